"""A job on the demo model's prompts, and what its results file holds."""

from __future__ import annotations

import json

import h5py
import torch

from hpcdecode.model.run.weight_size import weight_bytes
from tests.support.commands import ROOT

PROMPTS = ROOT / "jobs" / "demo" / "prompts.jsonl"
FLAGS = ("--model", "demo", "--max-tokens", 12, "--dtype", "float32", "--batch", 16, "--period", 3)
WEIGHTS_MIB = weight_bytes(ROOT / "jobs" / "demo" / "model", torch.float32, "auto") / 2**20  # as such a job holds them


def contents(path):
    with h5py.File(path) as file:
        summary = json.loads(file.attrs["summary"])
        rows = {name: file["rows"][name][:].tolist() for name in file["rows"] if not name.endswith("_at")}
        assert file.attrs["complete"]
        return rows, json.loads(file.attrs["topology"]), summary
