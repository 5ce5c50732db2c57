"""Costs from lanes that were measured in their steady state, by the operations of the timeline.

The S-rank is measured where it always has another lane to go on with, at short contexts: it is slower after a wait.
An R-rank is measured with one lane, where the S-rank waits meanwhile.
"""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from statistics import median
from typing import NamedTuple

import numpy as np
from msgspec.structs import replace

from hpcdecode.attention.shapes import MixerShape
from hpcdecode.planning.cost import Cost
from hpcdecode.planning.layer_work import (
    attend_flop,
    by_window,
    indexed,
    key_bytes,
    most_chosen,
    read_bytes,
    score_flop,
    without_indexers,
)
from hpcdecode.planning.seen_tokens import ChosenTokens, WindowTokens
from hpcdecode.planning.steady_load import OperationSeconds, SteadyLoad
from hpcdecode.planning.step_time import step_seconds

_BY_TOKENS = ("slice", "post", "take")  # operations of the S-rank that grow with all tokens
_BY_SAMPLED_TOKENS = ("plan", "logits", "sample", "commit", "desk", "other")
_R_STEP = ("plan", "post", "attend", "other")  # operations of an R-rank in a step without prompts
_LEAST = 1e-4  # seconds of waiting in a step, so that relative errors are defined
NO_WINDOWS: Mapping[int, float] = {}
_FRACTIONS = np.linspace(0, 1, 101)  # of shared cores that are tried


class Sample(NamedTuple):
    """One measurement.

    Attributes:
        load: What was run.
        ranks: Seconds of a step by operation, of every rank, the S-rank first; `step` is the whole step.
    """

    load: SteadyLoad
    ranks: list[OperationSeconds]


def fit(
    samples: Sequence[Sample],
    layers: int,
    *,
    attends: bool = True,
    keeps_states: bool = False,
    windows: Mapping[int, float] = NO_WINDOWS,
) -> Cost:
    """Return the cost that comes nearest to the samples.

    Args:
        samples: Measurements of the same ranks, at least one with two or more lanes if there are several ranks.
        layers: L of the model.
        attends: Whether any of them attends, so that cached tokens cost something.
        keeps_states: Whether any keeps states: R-ranks advance them by prompts, beside sequences that decode.
        windows: Share of the attention to a token that windows of each size have.
    """
    by_load = medians(samples)
    single_process = len(by_load[0].ranks) == 1
    lanes, context = max(s.load.lanes for s in by_load), min(s.load.context for s in by_load)
    busy = [s for s in by_load if s.load.lanes == lanes and s.load.context == context]
    plain, with_prompts = [s for s in busy if not s.load.prompt], [s for s in busy if s.load.prompt]
    one_lane = [s for s in by_load if s.load.lanes == 1 and not s.load.prompt]
    slices = _table((s.load.lane_batch + s.load.chunk, _sum(s.ranks[0], _BY_TOKENS) / lanes) for s in busy)
    logits = _table((s.load.lane_batch, _sum(s.ranks[0], _BY_SAMPLED_TOKENS) / lanes) for s in plain)
    attend = _attend_costs(one_lane, single_process, attends, windows)
    prefill_sizes = [(lanes, lanes * seen(s.load.pairs, s.load.chunk, windows)) for s in with_prompts]
    prefill_per_step, prefill_per_pair = non_negative_fit(prefill_sizes, _spent(with_prompts, "prefill"))
    append_sizes = [(lanes * s.load.chunk,) for s in with_prompts]
    appended = _spent(with_prompts, "append")
    if keeps_states:
        appended = [a + b for a, b in zip(appended, _beside(with_prompts, plain), strict=True)]
    (append_per_token,) = non_negative_fit(append_sizes, appended)
    cost = Cost(
        layers=layers,
        slice_tokens=slices.sizes,
        slice_seconds=slices.seconds,
        logits_tokens=logits.sizes,
        logits_seconds_at=logits.seconds,
        attend_seconds_per_cached_token=attend.per_cached_token,
        attend_seconds_per_sequence=attend.per_sequence,
        prefill_seconds_per_pair=prefill_per_pair,
        wire_seconds_per_token=0.0,
        message_latency_seconds=0.0,
        prefill_seconds_per_step=prefill_per_step,
        attend_seconds_per_step=attend.per_step,
        append_seconds_per_prompt_token=append_per_token,
        shared_core_fraction=1.0,
        windows=tuple(
            WindowTokens(most, share * attend.per_cached_token, share * prefill_per_pair)
            for most, share in windows.items()
        ),
    )
    if single_process:
        return cost
    return min((_with_wire(cost, float(f), one_lane) for f in _FRACTIONS), key=lambda c: error(c, by_load))


def seen(tokens: float, queries: float, windows: Mapping[int, float]) -> float:
    """Return the tokens that queries attend to, each layer's share of them, if windows have such shares of it."""
    return tokens - sum(share * max(tokens - most * queries, 0.0) for most, share in windows.items())


def window_shares(layers: Sequence[MixerShape]) -> dict[int, float]:
    """Return what share windows of each size have of the attention to a token, by FLOP."""
    return {size: attend_flop(own) / attend_flop(layers) for size, own in by_window(layers).items()}


def chosen_at_rate(cost: Cost, layers: Sequence[MixerShape], kv_dtype: str) -> ChosenTokens | None:
    """Return what indexers save and take, at the rate of the attention to all tokens that was measured.

    What is measured has contexts of at most 1,024 tokens, of which indexers choose all without a score. FLOP count in
    prompts and where attention is over latents, else bytes of K, V and index keys.

    Args:
        cost: What was measured.
        layers: Shapes of the model's layers.
        kv_dtype: Data type that K and V are stored as.

    Returns:
        None if no layer has an indexer.
    """
    choosing = indexed(layers)
    if not choosing:
        return None
    skipped, scored = (flop / attend_flop(layers) for flop in (attend_flop(choosing), score_flop(choosing)))
    skipped_cached, scored_cached = skipped, scored
    if not all(s.latent for s in choosing):
        every, own = (read_bytes(without_indexers(some), kv_dtype) for some in (layers, choosing))
        skipped_cached, scored_cached = own / every, max(key_bytes(choosing, kv_dtype) / every, scored)
    return ChosenTokens(
        most=most_chosen(choosing),
        skipped_seconds_per_cached_token=skipped_cached * cost.attend_seconds_per_cached_token,
        score_seconds_per_cached_token=scored_cached * cost.attend_seconds_per_cached_token,
        skipped_seconds_per_pair=skipped * cost.prefill_seconds_per_pair,
        score_seconds_per_pair=scored * cost.prefill_seconds_per_pair,
    )


def medians(samples: Sequence[Sample]) -> list[Sample]:
    """Return one sample for every load, with the median of every operation over the passes."""
    by_load: dict[SteadyLoad, list[list[OperationSeconds]]] = defaultdict(list)
    for load, ranks in samples:
        by_load[load].append(ranks)
    return [Sample(load, [_median(own) for own in zip(*passes, strict=True)]) for load, passes in by_load.items()]


def _median(passes: Sequence[OperationSeconds]) -> OperationSeconds:
    return {o: median(own.get(o, 0.0) for own in passes) for o in {o for own in passes for o in own}}


def error(cost: Cost, samples: Sequence[Sample]) -> float:
    """Return the mean of log(predicted / measured seconds of a step) squared."""
    logs = [np.log(predicted(cost, s.load, len(s.ranks)) / s.ranks[0]["step"]) for s in samples]
    return float(np.mean([log**2 for log in logs]))


def predicted(cost: Cost, load: SteadyLoad, ranks: int) -> float:
    """Return the seconds of a step of all lanes, on so many ranks."""
    batch, parts = load.lane_batch, max(ranks - 1, 1)
    sequences = np.array([(batch + parts - 1 - i) // parts for i in range(parts)])
    attended = sequences * load.attended_tokens
    lane = cost.lane_seconds(batch + load.chunk, load.chunk, load.pairs, attended, sequences)
    return step_seconds([[lane] * load.lanes], cost.shared_core_fraction) + load.lanes * cost.logits_seconds(batch)


class _AttendCosts(NamedTuple):
    """Seconds on one R-rank."""

    per_cached_token: float
    per_sequence: float
    per_step: float


def _attend_costs(
    samples: Sequence[Sample], single_process: bool, attends: bool, windows: Mapping[int, float]
) -> _AttendCosts:
    """Return what attention and states cost; a single process has no cost of a step, as its S-part has it."""
    sizes: list[tuple[float, ...]] = []
    seconds: list[float] = []
    for load, ranks in samples:
        for i, rank in enumerate(ranks if single_process else ranks[1:]):
            sequences = len(range(i, load.batch, max(len(ranks) - 1, 1)))
            if sequences:
                cached = seen(sequences * load.attended_tokens, sequences, windows) if attends else 0
                sizes.append((cached, sequences, 0 if single_process else 1))
                seconds.append(rank["attend"] if single_process else _sum(rank, _R_STEP))
    return _AttendCosts(*non_negative_fit(sizes, seconds))


def _with_wire(cost: Cost, shared_core_fraction: float, samples: Sequence[Sample]) -> Cost:
    """Return the cost with wire and latency: what is left of the S-rank's waits once the R-ranks are done."""
    sizes: list[tuple[float, ...]] = []
    seconds: list[float] = []
    for load, ranks in samples:
        busy = [_sum(rank, _R_STEP) for rank in ranks[1:]]
        sizes.append((load.batch, 2 * cost.layers))
        seconds.append(max(ranks[0]["wait"] - max(*busy, shared_core_fraction * sum(busy)), _LEAST))
    wire, latency = non_negative_fit(sizes, seconds)
    return replace(
        cost,
        wire_seconds_per_token=wire,
        message_latency_seconds=latency,
        shared_core_fraction=shared_core_fraction,
    )


def non_negative_fit(sizes: Sequence[tuple[float, ...]], seconds: Iterable[float]) -> list[float]:
    """Return the seconds of one of each size, none below 0, by least squares of the relative error.

    The most negative one is set to 0 and left out, until none is negative. What took no time costs nothing.

    Args:
        sizes: [samples, kinds].
        seconds: [samples]; those above 0 count.
    """
    took = [(size, spent) for size, spent in zip(sizes, seconds, strict=True) if spent > 0]
    found = np.zeros(len(sizes[0]))
    if not took:
        return [0.0] * len(found)
    scaled, used = np.array([np.array(size, float) / spent for size, spent in took]), list(range(len(found)))
    while used:
        each = np.linalg.lstsq(scaled[:, used], np.ones(len(scaled)), rcond=None)[0]
        if min(each) >= 0:
            found[used] = each
            break
        used.pop(int(np.argmin(each)))
    return [float(x) for x in found]


class _SampleTable(NamedTuple):
    sizes: list[int]
    seconds: list[float]


def _table(pairs: Iterable[tuple[int, float]]) -> _SampleTable:
    """Return the sizes in order, and the median seconds of each."""
    by_size: dict[int, list[float]] = defaultdict(list)
    for size, seconds in pairs:
        by_size[size].append(seconds)
    return _SampleTable(sorted(by_size), [median(by_size[size]) for size in sorted(by_size)])


def _spent(samples: Sequence[Sample], operation: str) -> list[float]:
    """Return the seconds of an operation in each sample, all ranks together."""
    return [sum(rank.get(operation, 0.0) for rank in s.ranks) for s in samples]


def _beside(with_prompts: Sequence[Sample], plain: Sequence[Sample]) -> list[float]:
    """Return the seconds in which R-ranks attend beyond those of the same load without prompts, all together."""
    without = {s.load: spent for s, spent in zip(plain, _spent(plain, "attend"), strict=True)}
    loads = [dataclasses.replace(s.load, prompt=0, chunk=0) for s in with_prompts]
    spent = _spent(with_prompts, "attend")
    return [max(own - without[load], 0.0) for own, load in zip(spent, loads, strict=True)]


def _sum(rank: OperationSeconds, operations: Sequence[str]) -> float:
    return sum(rank.get(o, 0.0) for o in operations)
