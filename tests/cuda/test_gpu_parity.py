"""On a GPU: token parity in float32, whichever of S and R is there; and copies that are waited for."""

from __future__ import annotations

import json

import pytest
import torch

from hpcdecode.exchange.device import CudaCopies
from tests.support.parity import generated, make_case

WORLDS = {
    "S on the GPU": (1, "--device", "cuda"),
    "all on the GPU": (1, "--device", "cuda", "--r-device", "cuda"),
    "R on the GPU": (1, "--device", "cpu", "--r-device", "cuda"),
    "S on the GPU, two R-ranks": (3, "--s-ranks", 1, "--device", "cuda"),
    "S on the GPU, R where auto puts it": (3, "--s-ranks", 1, "--device", "cuda", "--r-device", "auto"),
    "S and R on GPUs, apart": (2, "--s-ranks", 1, "--device", "cuda", "--r-device", "cuda"),
    "the same through host memory": (2, "--s-ranks", 1, "--device", "cuda", "--r-device", "cuda", "--no-gpu-mpi"),
}


@pytest.mark.parametrize(
    "name",
    [
        *("llama3", "qwen3", "gemma2", "mixtral", "deepseek_v3", "qwen3_next", "kimi_linear", "mamba2"),
        *("deepseek_v32", "deepseek_v4", "minimax_m3", "inkling2"),
    ],
)
def test_tokens_equal_those_of_transformers(hpcdecode, tmp_path, name):
    case = make_case(name, tmp_path, rows=8, new_tokens=24, ignore_eos=True, max_tokens=24)
    flags = ("--model", case / "model", "--dtype", "float32", "--kv-memory", "64M", "--batch", 10, "--overwrite")
    for world, (ranks, *own) in WORLDS.items():
        result = hpcdecode("generate", case / "prompts.jsonl", "-o", case / "out.h5", *flags, *own, ranks=ranks)
        assert result.returncode == 0, f"{world}: {result.stderr}"
        assert generated(case / "out.h5") == json.loads((case / "reference.json").read_text()), world


def test_copies_wait_for_what_is_computed_and_are_waited_for():
    device = torch.device("cuda")
    copies, x = CudaCopies(device), torch.randn(4096, 4096, device=device)
    for _ in range(3):
        y = x
        for _ in range(8):
            y = y @ x / 64
        host = copies.pinned(*y.shape, y.dtype)
        mark = copies.out([(host, y)])
        while not mark.Test():
            pass
        assert torch.equal(host, y.cpu())
        z = torch.zeros_like(y)
        copies.into([(z, host)], mark)
        assert torch.equal(z + 1, y + 1)
