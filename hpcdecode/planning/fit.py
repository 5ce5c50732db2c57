"""From lanes that were measured in their steady state to what each thing costs, by operations of the timeline."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from statistics import median

import numpy as np
from msgspec.structs import replace

from hpcdecode.planning.cost import Cost, step_seconds
from hpcdecode.planning.steady import SteadyLoad

Sample = tuple[SteadyLoad, list[dict[str, float]]]  # seconds of a step by operation, of every rank: the S-rank first

_BY_TOKENS = ("slice", "post", "take")
_BY_DRAWN = ("plan", "logits", "sample", "commit", "desk", "other")
_R_STEP = ("plan", "post", "attend", "other")
_LEAST = 1e-4  # seconds of a step
_SHARES = np.linspace(0, 1, 101)


def fit(samples: Sequence[Sample], layers: int) -> Cost:
    """The costs that come nearest to the samples, all of which are of the same ranks.

    What the S-rank takes is seen where it always has another lane to go on with, at short contexts: it is slower after
    a wait. What an R-rank takes is seen with one lane, where the S-rank waits meanwhile.
    """
    loads = medians(samples)
    alone = len(loads[0][1]) == 1
    lanes, context = max(load.lanes for load, _ in loads), min(load.context for load, _ in loads)
    busy = [(load, ranks) for load, ranks in loads if load.lanes == lanes and load.context == context]
    plain, prompts = ([each for each in busy if bool(each[0].prompt) is kind] for kind in (False, True))
    single = [(load, ranks) for load, ranks in loads if load.lanes == 1 and not load.prompt]
    tokens, body = _table((load.lane_batch + load.chunk, _sum(ranks[0], _BY_TOKENS) / lanes) for load, ranks in busy)
    drawn, logits = _table((load.lane_batch, _sum(ranks[0], _BY_DRAWN) / lanes) for load, ranks in plain)
    attend, row, begin = _attention(single, alone)
    chunk, prefill = _line([(lanes, lanes * _pairs(load)) for load, _ in prompts], _spent(prompts, "prefill"))
    (append,) = _line([(lanes * load.chunk,) for load, _ in prompts], _spent(prompts, "append"))
    cost = Cost(
        layers=layers,
        tokens=tokens,
        body=body,
        drawn=drawn,
        logits=logits,
        attend=attend,
        row=row,
        prefill=prefill,
        wire=0.0,
        latency=0.0,
        chunk=chunk,
        begin=begin,
        append=append,
        shared=1.0,
    )
    return cost if alone else min((_wired(cost, s, single) for s in _SHARES), key=lambda c: error(c, loads))


def medians(samples: Sequence[Sample]) -> list[Sample]:
    """Of every load, every operation's median over the passes."""
    by_load = defaultdict(list)
    for load, ranks in samples:
        by_load[load].append(ranks)
    return [(load, [_median(own) for own in zip(*passes, strict=True)]) for load, passes in by_load.items()]


def _median(passes: Sequence[dict[str, float]]) -> dict[str, float]:
    return {o: median(own.get(o, 0.0) for own in passes) for o in {o for own in passes for o in own}}


def error(cost: Cost, loads: Sequence[Sample]) -> float:
    """Mean of the squared logarithms of predicted over measured steps."""
    return float(np.mean([np.log(predicted(cost, load, len(ranks)) / ranks[0]["step"]) ** 2 for load, ranks in loads]))


def predicted(cost: Cost, load: SteadyLoad, ranks: int) -> float:
    """Seconds of a step of all lanes."""
    rows, parts = load.lane_batch, max(ranks - 1, 1)
    shares = np.array([(rows + parts - 1 - i) // parts for i in range(parts)])
    turn = cost.lane(rows + load.chunk, load.chunk, _pairs(load), shares * _attended(load), shares)
    return step_seconds([turn] * load.lanes, cost.shared) + load.lanes * cost.logits_seconds(rows)


def _attention(loads: Sequence[Sample], alone: bool) -> tuple[float, float, float]:
    """Seconds of a cached token, of a sequence beyond that, and of a step, on one R-rank."""
    sizes, seconds = [], []
    for load, ranks in loads:
        for i, rank in enumerate(ranks if alone else ranks[1:]):
            rows = len(range(i, load.batch, max(len(ranks) - 1, 1)))
            if rows:
                sizes.append((rows * _attended(load), rows, 0 if alone else 1))
                seconds.append(rank["attend"] if alone else _sum(rank, _R_STEP))
    return tuple(_line(sizes, seconds))


def _wired(cost: Cost, shared: float, loads: Sequence[Sample]) -> Cost:
    """With the seconds of a token and the latency that are left of the S-rank's waits once the R-ranks are done."""
    sizes, left = [], []
    for load, ranks in loads:
        busy = [_sum(rank, _R_STEP) for rank in ranks[1:]]
        sizes.append((load.batch, 2 * cost.layers))
        left.append(max(ranks[0]["wait"] - max(*busy, shared * sum(busy)), _LEAST))
    wire, latency = _line(sizes, left)
    return replace(cost, wire=wire, latency=latency, shared=float(shared))


def _line(sizes: Sequence[tuple[float, ...]], seconds: Iterable[float]) -> list[float]:
    """Seconds of one of each, none below 0, by the relative error."""
    scaled = np.array(sizes, float) / np.array(list(seconds))[:, None]
    found, used = np.zeros(scaled.shape[1]), list(range(scaled.shape[1]))
    while used:
        each = np.linalg.lstsq(scaled[:, used], np.ones(len(scaled)), rcond=None)[0]
        if min(each) >= 0:
            found[used] = each
            break
        used.pop(int(np.argmin(each)))
    return found.tolist()


def _table(pairs: Iterable[tuple[int, float]]) -> tuple[list[int], list[float]]:
    """Sizes in order, and the median seconds of each."""
    by_size = defaultdict(list)
    for size, seconds in pairs:
        by_size[size].append(seconds)
    return sorted(by_size), [median(by_size[size]) for size in sorted(by_size)]


def _spent(loads: Sequence[Sample], operation: str) -> list[float]:
    """Of all ranks together."""
    return [sum(rank.get(operation, 0.0) for rank in ranks) for _, ranks in loads]


def _sum(rank: dict[str, float], operations: Sequence[str]) -> float:
    return sum(rank.get(o, 0.0) for o in operations)


def _attended(load: SteadyLoad) -> float:
    """Tokens of a sequence in the mean step."""
    return load.context + 1 + (load.steps + 1) / 2


def _pairs(load: SteadyLoad) -> float:
    """Queries and keys of prompts in a step."""
    return load.chunk * (load.prompt + 1) / 2
