"""The look at the kernels' machine code finds local memory, kernels without tensor cores and those that are missing."""

from __future__ import annotations

import shutil

import pytest

from tests.cuda.sass import kernels, problems, table, tool

NAME = "_ZN9hpcdecode43_GLOBAL__N__ac9292e9_10_kernels_cu_15c7018c13attend_kernelINS_{}ELi4EEEvNS_10AttendArgsE"
LINE = "        /*{:04x}*/                   {} ;          /* 0x0000000000037919 */\n"
ENCODING = "                                                   /* 0x000e6e0000002500 */\n"


def code(kind: str, *instructions: str) -> str:
    """Return what cuobjdump prints of a kernel."""
    body = [f"\t\tFunction : {NAME.format(kind)}\n"]
    for place, each in enumerate((*instructions, *["IADD3 R1, R1, 0x1, RZ"] * 400)):
        body += [LINE.format(16 * place, each), ENCODING]
    return "".join(body)


HMMA = ["@!P0 HMMA.16816.F32.BF16 R4, R8, R12, R4"] * 8


def test_instructions_are_counted_by_kernel():
    found = kernels(code("7NumBF16", *HMMA, "LDSM.16.M88.4 R4, [R8]") + code("6NumF32", "LDS R1, [R2]"))
    assert [kernel.counts["HMMA"] for kernel in found] == [8, 0]
    assert found[0].counts.total() == 409 and found[0].counts["LDSM"] == 1
    assert problems(found) == []
    assert "attend_kernelINS_7NumBF16ELi4EEEvNS_10AttendArgsE" in table(found)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (code("7NumBF16"), "0 products on tensor cores"),
        (code("7NumBF16", *HMMA, "STL [R1], R2", "@P1 LDL R2, [R1]"), "2 accesses of local memory"),
        (code("7NumBF16", *HMMA * 2000), "16400 instructions"),
        ("", "no attention kernel"),
    ],
)
def test_what_is_wrong_is_told(text, expected):
    (problem,) = problems(kernels(text))
    assert expected in problem


def test_a_tool_beside_nvcc_is_found(tmp_path, monkeypatch):
    for name in ("nvcc", "cuobjdump"):
        (tmp_path / name).write_text("#!/bin/sh\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert tool("cuobjdump") == shutil.which("cuobjdump")
    assert tool("no-such-tool") is None
