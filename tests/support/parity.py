"""Cases of token parity: a checkpoint, a prompt file, and what transformers' `generate` makes of it, row by row."""

from __future__ import annotations

import hashlib
import inspect
import json
import os
import platform
from itertools import pairwise
from pathlib import Path

import h5py
import numpy as np
import torch
import transformers
from transformers import AutoConfig

from hpcdecode.model.frontend.architectures import model_class
from tests.support.kept import kept_folder
from tests.support.models import build

LENGTHS = (1, 2, 3, 5, 8, 13, 16, 17, 31, 33, 48, 63, 64, 65, 95, 97, 128, 150, 200, 256, 300, 401, 555, 700)
SMALLEST_GAP = 1e-5  # between logits of the order of 10


def make_case(
    name: str, directory: Path, *, rows: int = 24, new_tokens: int = 48, common: int = 0, **fields: object
) -> Path:
    """Write model/, prompts.jsonl and reference.json (greedy token ids by row) to directory/name; returns it.

    common: tokens that all prompts begin with. fields: sampling fields of every row of the prompt file.

    Prompts on which two tokens tie to within float32 rounding are drawn again: the order of sums decides them, in
    transformers as here.
    """
    case = directory / name
    made = build(name, case / "model")
    kept = _kept(made, rows, new_tokens, common)
    if not kept.exists():
        kept.parent.mkdir(parents=True, exist_ok=True)
        part = kept.with_name(f"{kept.name}.{os.getpid()}")
        part.write_text(json.dumps(_reference(made, rows, new_tokens, common)))
        part.rename(kept)
    prompts, reference = json.loads(kept.read_text())
    lines = (json.dumps({"prompt_token_ids": prompt, **fields}) + "\n" for prompt in prompts)
    (case / "prompts.jsonl").write_text("".join(lines))
    (case / "reference.json").write_text(json.dumps(reference))
    return case


def _kept(model: Path, *asked: object) -> Path:
    """Where a reference is kept: by what is asked of which config and weights."""
    files = [Path(model) / "config.json", *sorted(Path(model).glob("*.safetensors"))]
    weights = [hashlib.sha256(file.read_bytes()).hexdigest() for file in files]
    sources = [Path(inspect.getfile(part)).read_text() for part in (_kept, build)]
    who = (transformers.__version__, torch.__version__, platform.machine(), weights, *sources, *asked)
    return kept_folder() / f"{hashlib.sha256(repr(who).encode()).hexdigest()}.json"


def _reference(model: Path, rows: int, new_tokens: int, common: int) -> tuple[list[list[int]], list[list[int]]]:
    """Prompts, and what transformers makes of them; on one thread, as so small a model has no work for two."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        kind = model_class(AutoConfig.from_pretrained(model))
        return _drawn(kind.from_pretrained(model, dtype=torch.float32).eval(), rows, new_tokens, common)
    finally:
        torch.set_num_threads(before)


def _drawn(model, rows: int, new_tokens: int, common: int) -> tuple[list[list[int]], list[list[int]]]:
    """Prompts without near ties, and the tokens of a model."""
    draw = np.random.default_rng(7)
    lengths = [LENGTHS[round(i * (len(LENGTHS) - 1) / max(rows - 1, 1))] for i in range(rows)]
    beginning = draw.integers(5, model.config.get_text_config().vocab_size, common).tolist()
    prompts, reference = [], []
    for length in draw.permutation(lengths):
        gap = 0.0
        while gap < SMALLEST_GAP:
            prompt = beginning + draw.integers(5, model.config.get_text_config().vocab_size, length).tolist()
            tokens, gap = greedy(model, prompt, new_tokens)
        prompts.append(prompt)
        reference.append(tokens)
    return prompts, reference


@torch.inference_mode()
def greedy(model, prompt: list[int], new_tokens: int) -> tuple[list[int], float]:
    """What transformers' `generate` makes of a prompt, and the least difference between its first and second choice."""
    made = model.generate(
        torch.tensor([prompt]),
        do_sample=False,
        max_new_tokens=new_tokens,
        eos_token_id=None,
        pad_token_id=0,
        output_logits=True,
        return_dict_in_generate=True,
    )
    best = torch.cat(made.logits).topk(2).values
    return made.sequences[0, len(prompt) :].tolist(), float((best[:, 0] - best[:, 1]).min())


def generated(path: Path) -> list[list[int]]:
    """Token ids by row of a results file."""
    with h5py.File(path) as file:
        assert file.attrs["complete"]
        assert len(file["errors/line"]) == 0, list(file["errors/reason"])
        offsets, tokens = file["rows/token_offsets"][:], file["rows/token_ids"][:]
    return [tokens[a:b].tolist() for a, b in pairwise(offsets)]
