"""Fixtures of the tests of attention."""

from __future__ import annotations

import pytest

from hpcdecode import _attn_cpu


@pytest.fixture(autouse=True)
def threads_at_once(all_cores) -> None:
    pass


@pytest.fixture(params=_attn_cpu.supported_isas())
def isa(request, monkeypatch) -> str:
    """Each instruction set of this machine that there are kernels for, which are taken in the test."""
    monkeypatch.setenv("HPCDECODE_ISA", request.param)
    return request.param
