"""Cases of token parity: a checkpoint, a prompt file, and what transformers' `generate` makes of it, row by row."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path

import numpy as np

from tests.models import build

LENGTHS = (1, 2, 3, 5, 8, 13, 16, 17, 31, 33, 48, 63, 64, 65, 95, 97, 128, 150, 200, 256, 300, 401, 555, 700)


def make_case(name: str, directory: Path, *, rows: int = 24, new_tokens: int = 48, **fields: object) -> Path:
    """Write model/, prompts.jsonl and reference.json (greedy token ids by row) to directory/name; returns it.

    fields: sampling fields of every row of the prompt file.
    """
    import torch
    from transformers import AutoModelForCausalLM

    case = directory / name
    model_path = build(name, case / "model")
    config = json.loads((Path(model_path) / "config.json").read_text())
    draw = np.random.default_rng(7)
    lengths = [LENGTHS[round(i * (len(LENGTHS) - 1) / max(rows - 1, 1))] for i in range(rows)]
    prompts = [draw.integers(5, config["vocab_size"], n).tolist() for n in draw.permutation(lengths)]
    with open(case / "prompts.jsonl", "w") as file:
        file.writelines(json.dumps({"prompt_token_ids": p, **fields}) + "\n" for p in prompts)
    model = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32).eval()
    reference = []
    with torch.inference_mode():
        for prompt in prompts:
            made = model.generate(
                torch.tensor([prompt]), do_sample=False, max_new_tokens=new_tokens, eos_token_id=None, pad_token_id=0
            )
            reference.append(made[0, len(prompt) :].tolist())
    (case / "reference.json").write_text(json.dumps(reference))
    return case


def generated(path: Path) -> list[list[int]]:
    """Token ids by row of a results file."""
    import h5py

    with h5py.File(path) as file:
        assert file.attrs["complete"]
        assert len(file["errors/line"]) == 0, list(file["errors/reason"])
        offsets, tokens = file["rows/token_offsets"][:], file["rows/token_ids"][:]
    return [tokens[a:b].tolist() for a, b in pairwise(offsets)]
