"""Cases of token parity: a checkpoint, a prompt file, and what transformers' `generate` makes of it, row by row."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path

import h5py
import numpy as np
import torch
from transformers import AutoModelForCausalLM

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
    model = AutoModelForCausalLM.from_pretrained(build(name, case / "model"), dtype=torch.float32).eval()
    draw = np.random.default_rng(7)
    lengths = [LENGTHS[round(i * (len(LENGTHS) - 1) / max(rows - 1, 1))] for i in range(rows)]
    beginning = draw.integers(5, model.config.vocab_size, common).tolist()
    prompts, reference = [], []
    for length in draw.permutation(lengths):
        gap = 0.0
        while gap < SMALLEST_GAP:
            prompt = beginning + draw.integers(5, model.config.vocab_size, length).tolist()
            tokens, gap = greedy(model, prompt, new_tokens)
        prompts.append({"prompt_token_ids": prompt, **fields})
        reference.append(tokens)
    (case / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in prompts))
    (case / "reference.json").write_text(json.dumps(reference))
    return case


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
