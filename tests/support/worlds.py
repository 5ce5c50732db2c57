"""A job on the demo model's prompts, and what its results file holds."""

from __future__ import annotations

import json

import h5py

from tests.support.commands import ROOT

PROMPTS = ROOT / "jobs" / "demo" / "prompts.jsonl"
FLAGS = ("--model", "demo", "--max-tokens", 12, "--dtype", "float32", "--batch", 16, "--period", 3)
WEIGHTS_MIB = 9.24  # of the demo model in float32


def contents(path):
    with h5py.File(path) as file:
        summary = json.loads(file.attrs["summary"])
        rows = {name: file["rows"][name][:].tolist() for name in file["rows"] if not name.endswith("_at")}
        assert file.attrs["complete"]
        return rows, json.loads(file.attrs["topology"]), summary
