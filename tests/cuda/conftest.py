"""Runs where a GPU is found, with an hpcdecode that was built with CUDA."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from hpcdecode.attention import cuda as attention_cuda

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items) -> None:
    reason = "" if torch.cuda.is_available() else "no GPU, or a CPU build of torch"
    reason = reason or ("" if attention_cuda.built() else "hpcdecode was built without CUDA")
    for item in items:
        if reason and HERE in Path(item.fspath).parents:
            item.add_marker(pytest.mark.skip(reason=f"tests/cuda: {reason}"))
