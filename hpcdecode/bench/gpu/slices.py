"""A step's slices and logits against their bare GEMMs."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor

from hpcdecode.bench.device_clock import device_seconds
from hpcdecode.bench.output import Case
from hpcdecode.bench.workload import Shape
from hpcdecode.model import SplitModel
from hpcdecode.model.run.recorded_slices import RECORDED_FROM, RecordedSlices
from hpcdecode.report.benchmark import case

_ROTATED = 256 << 20  # bytes of weights in turn, at least; an L2 cache has 50 MB


def slices(
    model: SplitModel, shape: Shape, batch: int, passes: int, name: str = "slices", *, recorded: bool = False
) -> Iterator[Case]:
    """Yield the milliseconds of a step of `batch` sequences without its attention, against its bare GEMMs.

    Args:
        model: The model.
        shape: Its sizes.
        batch: Tokens of the step.
        passes: Number of measurements.
        name: Of the case.
        recorded: Replay slices from CUDA graphs, as jobs do.

    Raises:
        RuntimeError: If slices are to be replayed and cannot be recorded.
    """
    products = products_of(model, shape, batch)
    step = recorded_step_of(model, batch) if recorded else step_of(model, batch)
    times, ratios = [], []
    with torch.inference_mode():
        step()  # compiles or records
        for _ in range(passes + 1):
            limit = device_seconds(products, model.device)
            times.append(device_seconds(step, model.device))
            ratios.append(limit / times[-1])
    yield case(f"{name}, {batch} sequences", [t * 1e3 for t in times[1:]], "ms a step", "bare products", ratios[1:])


def recorded_step_of(model: SplitModel, batch: int) -> Callable[[], None]:
    """Return a function that replays all slices of a step, and computes its logits.

    Raises:
        RuntimeError: If slices cannot be recorded.
    """
    shared = RecordedSlices.of(model)
    if shared is None:
        raise RuntimeError("slices: expected some that can be recorded as CUDA graphs")
    own, ids, rows = shared.lane(0), torch.arange(batch, device=model.device), torch.arange(batch, device=model.device)
    first, last = (ids % model.vocab_size, ids * 0 + 7, rows), len(model.attends) - 1

    def step() -> None:
        own.begin(first)
        context: tuple[Tensor, ...] = first
        for layer in range(last + 1):
            _, context = own.slice(layer)
        model.logits(own.output(last), context)

    with torch.inference_mode():
        for _ in range(RECORDED_FROM):
            step()
    if not shared.works:
        raise RuntimeError("slices: expected some that can be recorded as CUDA graphs")
    return step


def weight_sets(shape: Shape, itemsize: int) -> int:
    """Return how many layers' weights bare GEMMs take in turn, so that none of them is in a cache when its turn comes.

    Args:
        shape: Sizes of the model.
        itemsize: Bytes of a weight.
    """
    layer = itemsize * sum(inputs * outputs for inputs, outputs in shape.linears)
    return min(shape.layers, -(-_ROTATED // layer))


def products_of(model: SplitModel, shape: Shape, batch: int) -> Callable[[], None]:
    """Return a function that multiplies as a step of `batch` sequences does, and does nothing else."""
    random = partial(torch.randn, dtype=model.dtype, device=model.device)
    x = {n: random(batch, n) for n in {n for n, _ in shape.linears}}
    weights = [[random(m, n) for n, m in shape.linears] for _ in range(weight_sets(shape, model.dtype.itemsize))]
    head = random(shape.vocabulary, shape.hidden)

    def products() -> None:
        for layer in range(shape.layers):
            for weight in weights[layer % len(weights)]:
                torch.nn.functional.linear(x[weight.shape[1]], weight)
        torch.nn.functional.linear(x[shape.hidden], head)

    return products


def step_seconds(model: SplitModel, batch: int, passes: int) -> float:
    """Return the median seconds of a step's slices and logits of `batch` sequences, alone, as jobs run them."""
    step = step_of(model, batch) if RecordedSlices.of(model) is None else recorded_step_of(model, batch)
    with torch.inference_mode():
        return statistics.median([device_seconds(step, model.device) for _ in range(passes + 1)][1:])


Between = Callable[..., None]  # of the rows of a layer, and o


def step_of(model: SplitModel, batch: int, between: Between | None = None) -> Callable[[], None]:
    """Return a function that runs all slices of a step; it calls `between` with q, k, v and o of every layer."""
    ids = torch.arange(batch, device=model.device) % model.vocab_size
    outs = [torch.zeros(batch, s.out_columns, dtype=model.dtype, device=model.device) for s in model.attends]

    def step() -> None:
        o: Tensor | None = None
        context: tuple[Tensor, ...] = ids, ids * 0 + 7, torch.arange(batch, device=model.device)
        for layer, out in enumerate(outs):
            rows, context = model.slice(layer, o, context)
            if between:
                between(*rows, out)
            o = out
        assert o is not None, "a model has layers"
        model.logits(o, context)

    return step
