"""The first day's proof that attention kernels are right on this device, and that they keep to their memory."""

from __future__ import annotations

import importlib.util
import shutil
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

import hpcdecode
from hpcdecode.attention.base import LATENT_KV_DTYPES
from hpcdecode.attention.cuda import KV_DTYPES
from hpcdecode.attention.open import by_kernels
from hpcdecode.attention.shapes import LayerShape
from hpcdecode.bench import filled
from hpcdecode.bench.gpu.attention import opened
from hpcdecode.bench.gpu.commands import Ended, run
from hpcdecode.bench.gpu.findings import Conditions, Findings, PartSkipped
from hpcdecode.bench.latent import MODELS

_EXACT = 2e-5  # share of max |v|, float32 activations; queries and weights keep 16 bits
_ROUNDED = 2e-2  # the same of bfloat16 activations
_TOOLS = ("memcheck", "racecheck", "synccheck", "initcheck")
_TOOL_ERROR = 86  # exit code of a sanitizer that found something
_ONLY_OURS = ("--print-limit", "20", "--kernel-regex", "kns=hpcdecode")
_SECONDS = 100  # of a sanitizer, and of the tests
_TESTS = ("test_cuda*.py", "test_torch_c*.py")


def shapes(emulated: bool) -> dict[str, LayerShape]:
    """Return layers to verify by name."""
    found = {
        "GQA4 d128": LayerShape(2, 128, 128, 8, 128**-0.5),
        "d64": LayerShape(2, 64, 64, 2, 64**-0.5),
        "GQA5 d192, V 128, window": LayerShape(1, 192, 128, 5, 192**-0.5, window=700),
        "GQA7 d256, softcap": LayerShape(1, 256, 256, 7, 256**-0.5, softcap=30.0),
        "GQA24 d48": LayerShape(1, 48, 48, 24, 48**-0.5),
        **{f"latents of {name}": model.latent for name, model in MODELS.items()},
    }
    few = ("GQA4 d128", "latents of glm-4.7-flash")
    return {name: shape for name, shape in found.items() if not emulated or name in few}


def kernels(on: Conditions, findings: Findings) -> None:
    """Compare attention with float64 for all data types and shapes; run the tests of the kernels where they are."""
    for dtype, most in ((torch.float32, _EXACT), (torch.bfloat16, _ROUNDED)):
        for name, shape in shapes(on.emulated).items():
            worst = {kv_dtype: _largest(shape, kv_dtype, on.device, dtype) for kv_dtype in _kv_dtypes(shape, on)}
            about = f"largest error / max |v|, {name}, activations {dtype}".replace("torch.", "")
            findings.check(about, f"<= {most}", worst, all(error <= most for error in worst.values()))
    if on.emulated:
        return
    if problem := _no_tests():
        findings.note("tests", problem)
        return
    code, text = run(_tests(), _SECONDS)
    findings.note("tests", text[-3000:])
    findings.check(f"pytest {' '.join(_TESTS)} in tests/attention", "exit code 0", code, code == 0)


def _kv_dtypes(shape: LayerShape, on: Conditions) -> Iterator[str]:
    for kv_dtype in LATENT_KV_DTYPES if shape.latent else KV_DTYPES:
        if by_kernels([shape], kv_dtype, on.device):
            yield kv_dtype


def _largest(shape: LayerShape, kv_dtype: str, device: torch.device, dtype: torch.dtype) -> float:
    kv_cache = opened(shape, kv_dtype, filled.LENGTHS, device)
    return max(filled.errors_of(kv_cache, shape, kv_dtype, device, dtype))


def _root() -> Path:
    return Path(hpcdecode.__file__).parent.parent


def _no_tests() -> str:
    """Return what of the tests is not here, or an empty text."""
    missing = [name for name in ("pytest", "hypothesis") if importlib.util.find_spec(name) is None]
    folder = _root() / "tests" / "attention"
    return f"no {', '.join(missing)}" if missing else "" if folder.is_dir() else f"no {folder}"


def _tests() -> list[str]:
    """Return the command that runs the kernels' tests on the device alone."""
    folder = _root() / "tests" / "attention"
    files = sorted(str(file) for pattern in _TESTS for file in folder.glob(pattern))
    workers = ["-n", "8"] if importlib.util.find_spec("xdist") else []
    flags = ["-x", "-q", "-k", "not cpu", "-p", "no:cacheprovider", "--rootdir", str(_root()), *workers]
    return [sys.executable, "-m", "pytest", *flags, *files]


def sanitizer(on: Conditions, findings: Findings) -> None:
    """Let a sanitizer's tools watch kernels; all of them at once, each a process of its own.

    Raises:
        PartSkipped: If there is no compute-sanitizer, or no GPU.
    """
    tool = shutil.which("compute-sanitizer")
    if on.emulated or not tool:
        script = [sys.executable, "-m", "hpcdecode.bench.gpu.sanitized", str(on.device)]
        code, text = run(script, _SECONDS)
        findings.note("what a sanitizer would watch", text)
        findings.check("hpcdecode.bench.gpu.sanitized", "exit code 0", code, code == 0)
        raise PartSkipped("kernels are emulated" if on.emulated else "compute-sanitizer is not on PATH")
    with ThreadPoolExecutor(len(_TOOLS)) as pool:
        for name, ended in zip(_TOOLS, pool.map(lambda each: _watched(tool, each, on.device), _TOOLS), strict=True):
            findings.note(name, ended.text)
            found = "took too long" if ended.code is None else f"exit code {ended.code}, {_summary(ended.text)}"
            findings.check(name, "0 errors", found, ended.code == 0)


def _watched(tool: str, name: str, device: torch.device) -> Ended:
    """Run kernels under one tool, which watches those of hpcdecode alone."""
    flags = ["--tool", name, "--error-exitcode", str(_TOOL_ERROR), *_ONLY_OURS]
    return run([tool, *flags, sys.executable, "-m", "hpcdecode.bench.gpu.sanitized", str(device)], _SECONDS)


def _summary(text: str) -> str:
    """Return the tool's last line of what it found."""
    return next((line.strip("= ") for line in reversed(text.splitlines()) if "SUMMARY" in line), "no summary")
