"""The first day's count of what a step waits for, tells the device and allocates."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

import torch

from hpcdecode.bench.gpu.findings import Conditions, Findings
from hpcdecode.bench.workload import checkpoint
from hpcdecode.config import EngineOptions
from hpcdecode.engine.calls import Calls
from hpcdecode.engine.engine import Engine
from hpcdecode.ranks.team import assemble
from hpcdecode.requests.params import SamplingParams

_MOST_A_STEP = 5  # synchronisations
_MODELS = {"tiny": 2, "tiny-6-layers": 6}  # layers
_ROWS, _PROMPT = 8, 24
_TOKENS = 16, 48  # a short run and a long one: their difference is of steps alone
_SYNCHRONISING = "called a synchronizing"
_READS = ("aten::_local_scalar_dense", "aten::nonzero", "aten::masked_select")  # of a device, these wait
_FEW = 0.1  # allocations a step: of torch's allocator as a job grows
_ALLOCATIONS = ("cudaMalloc", "cudaFree", "cudaHostAlloc")

Runner = Callable[[int], int]  # of tokens a row: returns the steps that it took
Counting = Callable[[Counter[str]], AbstractContextManager[None]]


def syncs(on: Conditions, findings: Findings) -> None:
    """Count the synchronisations of a decode step by models of 2 and 6 layers: at most five, and none a layer."""
    places = {"emulated": "cpu"} if on.emulated else {"all on the GPU": "cuda", "S on the GPU, R on CPUs": "cpu"}
    for name, r_device in places.items():
        steps = []
        for model, layers in _MODELS.items():
            run, about = _runner(on, model, r_device), f"{name}, {layers} layers"
            found = _a_step(run, _reads if on.emulated else _synchronisations)
            findings.note(f"syncs a step by place, {about}", found)
            steps.append(sum(found.values()))
            findings.check(f"syncs a step, {about}", f"<= {_MOST_A_STEP}", steps[-1], steps[-1] <= _MOST_A_STEP)
            if not on.emulated:
                _check_calls(run, about, findings)
        more = steps[1] - steps[0]
        findings.check(f"syncs of four layers more, {name}", "none", round(more, 3), more < 0.5)


def _runner(on: Conditions, model: str, r_device: str) -> Runner:
    """Return a function that generates so many tokens for every row in this process."""
    device = on.device.type
    options = EngineOptions(
        model=str(checkpoint(on.work, model)),
        dtype="bfloat16",
        device=device,
        r_device=r_device,
        batch=_ROWS,
        lanes=1,
        kv_memory=256 << 20,
    ).check()
    engine = Engine(options, assemble(None, None, device, r_device))
    calls = Calls(engine)
    prompts: list[object] = [{"prompt_token_ids": [4 + row] * _PROMPT} for row in range(_ROWS)]

    def run(tokens: int) -> int:
        calls.run(prompts, SamplingParams(max_tokens=tokens, ignore_eos=True), False)
        return engine.metrics().steps

    run(_TOKENS[0])  # warm-up
    return run


def _a_step(run: Runner, counting: Counting) -> dict[str, float]:
    """Return the counts of a step: those of more steps in a run that is otherwise alike."""
    found = []
    for tokens in _TOKENS:
        counts: Counter[str] = Counter()
        with counting(counts):
            steps = run(tokens)
        found.append((steps, counts))
    (few, before), (many, after) = found
    return {name: round((after[name] - before[name]) / (many - few), 3) for name in sorted(after)}


@contextmanager
def _synchronisations(counts: Counter[str]) -> Iterator[None]:
    """Count, by place in the code, what torch says of operations that wait for the GPU."""
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            yield
        finally:
            torch.cuda.set_sync_debug_mode("default")
    counts.update(f"{w.filename}:{w.lineno}" for w in told if _SYNCHRONISING in str(w.message))


@contextmanager
def _reads(counts: Counter[str]) -> Iterator[None]:
    """Count operators that would wait for a GPU, if tensors were there."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        yield
    counts.update({event.key: event.count for event in profile.key_averages() if event.key in _READS})


@contextmanager
def _runtime_calls(counts: Counter[str]) -> Iterator[None]:
    """Count calls of the CUDA runtime: launches, waits and allocations, those of hpcdecode's kernels too."""
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        yield
    counts.update({event.key: event.count for event in profile.key_averages() if event.key.startswith("cu")})


def _check_calls(run: Runner, about: str, findings: Findings) -> None:
    """Note the runtime's calls of a step; check that no step allocates."""
    try:
        calls = _a_step(run, _runtime_calls)
    except RuntimeError as error:  # of a profiler that may not watch this GPU
        findings.note(f"CUDA calls a step, {about}", str(error))
        return
    findings.note(f"CUDA calls a step, {about}", calls)
    allocations = sum(count for name, count in calls.items() if name.startswith(_ALLOCATIONS))
    if calls:
        findings.check(f"allocations a step, {about}", f"< {_FEW}", allocations, allocations < _FEW)
