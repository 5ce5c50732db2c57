"""Loads a model whose slices are compiled, and runs two steps: python -m hpcdecode.bench.gpu.compiled MODEL DEVICE.

Prints seconds as JSON: of loading, and of steps of 8 and 9 sequences, the first of their kinds.
"""

from __future__ import annotations

import json
import sys
from time import perf_counter

import torch

from hpcdecode.bench.device_clock import seconds_of_all
from hpcdecode.bench.gpu.slices import step_of
from hpcdecode.model import load_split


def main(folder: str, device: torch.device) -> None:
    """Load, run and print."""
    begun = perf_counter()
    model = load_split(folder, dtype="bfloat16", device=device, inductor=True)
    loaded = perf_counter() - begun
    with torch.inference_mode():
        steps = [seconds_of_all(step_of(model, batch), device) for batch in (8, 9)]
    print(json.dumps({"load": loaded, "steps": steps}))


if __name__ == "__main__":
    main(sys.argv[1], torch.device(sys.argv[2]))
