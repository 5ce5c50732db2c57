"""The instruction sets with GEMMs of our own, and a test's choice of one."""

from __future__ import annotations

import pytest

from hpcdecode import _attn_cpu

OWN_GEMMS = ("avx2", "avx512", "avx512_bf16", "amx")


def use_isa(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Let kernels use an instruction set in this test; skip the test if this machine has not got it."""
    if name not in _attn_cpu.supported_isas():
        pytest.skip(f"this machine has no {name}")
    monkeypatch.setenv("HPCDECODE_ISA", name)
