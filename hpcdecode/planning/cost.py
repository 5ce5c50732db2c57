"""Seconds of a decode step: the S-part by tokens, the R-part by cached tokens, the wire by bytes.

Symbols are those of the papers:

| symbol | meaning |
|---|---|
| B | tokens of a step, one of each sequence that decodes |
| N | weights of all layers |
| L, d | layers, columns of q in a layer |
| G | query heads for each KV head |
| e | bytes of an element |
| S, F | decode steps of a sequence, steps between two micro-batches |
| T(B) | seconds of the S-part of B tokens, all layers |
| R | seconds in which an R-rank attends to one cached token, all layers |

References:
    FastDecode: He and Zhai 2024, arXiv:2403.11421. S-part, R-part, T(B), R, and the steady state (`planner`).
    Lamina: Chen et al. 2024, arXiv:2405.01814. FLOP and bytes of the linear part, bytes of the wire.
    FluidInfer: Xiao. FLOP of the attention of prompts, bytes of swapped K and V (`serving`).
    Megatron-LM: Shoeybi et al. 2019, arXiv:1909.08053. Two all-reduces a layer under tensor parallelism.

What has no reference here is this project's own, checked against jobs by `hpcdecode bench planner`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, TypeVar

import msgspec
import numpy as np
from numpy.typing import NDArray

from hpcdecode.planning.seen_tokens import (
    Beyond,
    ChosenTokens,
    Count,
    OfRRanks,
    Seconds,
    WindowTokens,
    choosing_seconds,
)

Sizes = Annotated[list[Count], msgspec.Meta(min_length=2)]
SecondsAt = Annotated[list[Seconds], msgspec.Meta(min_length=2)]
Fraction = Annotated[float, msgspec.Meta(ge=0, le=1)]
Shares = Annotated[tuple[Fraction, ...], msgspec.Meta(min_length=1)]

_Seconds = TypeVar("_Seconds", bound=msgspec.Struct)


class Cost(msgspec.Struct, frozen=True):
    """What a model costs on its ranks, in seconds; profiles on disk keep the short names.

    Of a group of several members it is the cost of one of each stage, and of its R-ranks: their shares of weights and
    heads. What is said of all layers holds for a lane that goes through all stages or copies.

    Attributes:
        layers: L.
        slice_tokens: Token counts of `slice_seconds`, ascending.
        slice_seconds: T(B) (FastDecode): all slices of one lane step, with the work of the S-rank that goes with them.
        logits_tokens: Sampled tokens of `logits_seconds_at`, ascending.
        logits_seconds_at: Logits, sampling and planning of one lane step.
        attend_seconds_per_cached_token: R (FastDecode): one R-rank, all layers.
        attend_seconds_per_sequence: One R-rank, all layers, beyond the cached tokens: recurrent states above all.
        prefill_seconds_per_pair: Attention of one query and one key of a prompt, all layers, on the S-rank.
        wire_seconds_per_token: q, k, v there and o back, all layers.
        message_latency_seconds: One message, one way.
        prefill_seconds_per_step: Added to a lane step that carries prompt tokens.
        attend_seconds_per_step: Added to a lane step on every R-rank.
        append_seconds_per_prompt_token: K and V of a prompt token, and its way through states, all layers, on its
            R-rank.
        shared_core_fraction: Part of the sum of all ranks' seconds that ranks on shared cores cannot overlap. It is 0
            for ranks with cores of their own, and 1 for one process.
        sum_seconds_per_token: Sums of the members of a stage, all layers: a member moves and adds them itself.
        sum_latency_seconds: One sum, in which nothing is used.
        stage_shares: Share of the layers that each stage has; the last one has the logits.
        move_seconds_per_token: What a stage hands on to the next; of copies in rotation, what they do, all layers.
        move_latency_seconds: One such message.
        copies: K, copies of the model that run the slices of a lane in turn.
        prefill_ranks: Ranks of a group that only prefill, as fast as its S-rank.
        chosen: What indexers of sparse attention change; None if there are none.
        windows: What windows save, by their sizes.
        paged_tokens: Sequences of `paged_seconds_at`, ascending; none if they were not measured.
        paged_seconds_at: Added to a decode step of one process if its KV cache has pages, as rotation of groups has.
    """

    layers: Count
    slice_tokens: Sizes = msgspec.field(name="tokens")
    slice_seconds: SecondsAt = msgspec.field(name="body")
    logits_tokens: Sizes = msgspec.field(name="drawn")
    logits_seconds_at: SecondsAt = msgspec.field(name="logits")
    attend_seconds_per_cached_token: Seconds = msgspec.field(name="attend")
    attend_seconds_per_sequence: Seconds = msgspec.field(name="row")
    prefill_seconds_per_pair: Seconds = msgspec.field(name="prefill")
    wire_seconds_per_token: Seconds = msgspec.field(name="wire")
    message_latency_seconds: Seconds = msgspec.field(name="latency")
    prefill_seconds_per_step: Seconds = msgspec.field(default=0.0, name="chunk")
    attend_seconds_per_step: Seconds = msgspec.field(default=0.0, name="begin")
    append_seconds_per_prompt_token: Seconds = msgspec.field(default=0.0, name="append")
    shared_core_fraction: Fraction = msgspec.field(default=0.0, name="shared")
    sum_seconds_per_token: Seconds = msgspec.field(default=0.0, name="sums")
    sum_latency_seconds: Seconds = msgspec.field(default=0.0, name="sum_latency")
    stage_shares: Shares = msgspec.field(default=(1.0,), name="stages")
    move_seconds_per_token: Seconds = msgspec.field(default=0.0, name="move")
    move_latency_seconds: Seconds = msgspec.field(default=0.0, name="move_latency")
    copies: Count = 1
    prefill_ranks: Annotated[int, msgspec.Meta(ge=0)] = 0
    chosen: ChosenTokens | None = None
    windows: tuple[WindowTokens, ...] = ()
    paged_tokens: list[Count] = msgspec.field(default_factory=list)
    paged_seconds_at: list[Seconds] = msgspec.field(default_factory=list)

    def with_pages(self) -> Cost:
        """Return the costs of one process whose KV cache has pages: its decode steps are not fused."""
        if not self.paged_tokens:
            return self
        added = np.interp(self.slice_tokens, self.paged_tokens, self.paged_seconds_at)
        return msgspec.structs.replace(self, slice_seconds=(np.array(self.slice_seconds) + added).tolist())

    def times(self, factor: float) -> Cost:
        """Return costs that are all so many times as large."""
        windows = tuple(_times(window, factor) for window in self.windows)
        chosen = self.chosen and _times(self.chosen, factor)
        return msgspec.structs.replace(_times(self, factor), chosen=chosen, windows=windows)

    def body_seconds(self, tokens: float) -> float:
        """Return T(B), the seconds of all slices of one lane step (FastDecode)."""
        return _interpolated(self.slice_tokens, self.slice_seconds, tokens)

    def logits_seconds(self, sampled_tokens: float) -> float:
        """Return the seconds of the logits of one lane step, and of the sampling and planning that go with them."""
        return _interpolated(self.logits_tokens, self.logits_seconds_at, sampled_tokens)

    @property
    def most_seen(self) -> tuple[int, ...]:
        """Return how many tokens layers attend to at most that do not attend to all, of each kind of them."""
        return tuple(part.most for part in self._parts)

    def attention_seconds(
        self, cached_tokens: OfRRanks | float, sequences: OfRRanks | float, beyond: Sequence[Beyond] | None = None
    ) -> NDArray[np.float64]:
        """Return R * cached_tokens + attend_seconds_per_sequence * sequences, or what indexers and windows leave of it.

        Args:
            cached_tokens: Tokens of the sequences of an R-rank, of one or of all.
            sequences: Those sequences.
            beyond: What they have beyond each of `most_seen`; None if they count as of one length.
        """
        seconds = self.attend_seconds_per_cached_token * cached_tokens + self.attend_seconds_per_sequence * sequences
        rates = [part.of_cached_tokens for part in self._parts]
        return np.asarray(seconds + choosing_seconds(rates, cached_tokens, sequences, beyond))

    def pair_seconds(self, pairs: float, queries: float, beyond: Sequence[Beyond] | None = None) -> float:
        """Return the seconds of the attention of prompts.

        Args:
            pairs: Queries times the keys that each attends to, or may choose from.
            queries: Tokens of prompts.
            beyond: What they have beyond each of `most_seen`; None if each counts as having equally many keys.
        """
        rates = [part.of_pairs for part in self._parts]
        return self.prefill_seconds_per_pair * pairs + float(choosing_seconds(rates, pairs, queries, beyond))

    @property
    def _parts(self) -> list[ChosenTokens | WindowTokens]:
        """Return what changes the costs of layers that do not attend to all tokens, by kind."""
        return [*([self.chosen] if self.chosen else []), *self.windows]

    def lane_seconds(
        self,
        tokens: float,
        prompt_tokens: float,
        pairs: float,
        cached_tokens: OfRRanks,
        sequences: OfRRanks,
        beyond: Sequence[Beyond] | None = None,
        pairs_beyond: Sequence[Beyond] | None = None,
    ) -> LaneSeconds:
        """Return what one lane needs in a step, over all layers.

        S-rank: T(B) + sum_seconds_per_token * B + prefill_seconds_per_pair * pairs + prefill_seconds_per_step, the last
        with prompts only.
        R-rank i: R * cached_tokens[i] + attend_seconds_per_sequence * sequences[i] + attend_seconds_per_step
        + append_seconds_per_prompt_token * its even share of the prompt tokens.
        With indexers and windows pairs and cached tokens cost what `pair_seconds` and `attention_seconds` say.
        Wire: wire_seconds_per_token * B. Latency: two messages a layer, one there and one back; two sums a layer; of
        several stages a message each, the last one of the next step's tokens.

        Args:
            tokens: B, prompt tokens included.
            prompt_tokens: Those of prompts among them.
            pairs: Queries of prompts times the keys that each attends to.
            cached_tokens: Tokens that each R-rank attends to, [R-ranks].
            sequences: Sequences that each R-rank attends to, [R-ranks].
            beyond: What these have beyond each of `most_seen`; None if they count as of one length.
            pairs_beyond: What tokens of prompts have, as well.
        """
        active = 1.0 if tokens else 0.0
        prefill = self.prefill_seconds_per_step * min(prompt_tokens, 1.0)
        prefill += self.pair_seconds(pairs, prompt_tokens, pairs_beyond)
        attend = (
            self.attention_seconds(cached_tokens, sequences, beyond)
            + self.append_seconds_per_prompt_token * prompt_tokens / len(cached_tokens)
            + self.attend_seconds_per_step * active
        )
        return LaneSeconds(
            s_rank=self.body_seconds(tokens) + self.sum_seconds_per_token * tokens + prefill,
            r_ranks=attend,
            wire=self.wire_seconds_per_token * tokens,
            latency=self._latency_seconds * active,
            move=self.move_seconds_per_token * tokens,
        )

    def prompt_seconds(
        self, prompt_tokens: float, pairs: float, completed: float, beyond: Sequence[Beyond] | None = None
    ) -> float:
        """Return the seconds of a step of prompts alone on a rank that only prefills.

        They are those of its slices or of the wire, whichever takes longer, of logits, and of the messages of layers.

        Args:
            prompt_tokens: Of the step.
            pairs: Queries of prompts times the keys that each attends to.
            completed: Prompts that are complete, of which it has logits.
            beyond: What their tokens have beyond each of `most_seen`; None if each counts as having equally many keys.
        """
        none = np.zeros(1)
        lane = self.lane_seconds(prompt_tokens, prompt_tokens, pairs, none, none, None, beyond)
        return max(lane.s_rank, lane.wire) + lane.latency + self.logits_seconds(completed)

    @property
    def _latency_seconds(self) -> float:
        """Return the seconds of a lane step in which it waits and nothing is used."""
        stages = len(self.stage_shares)
        moves = stages * self.move_latency_seconds if stages > 1 else 0.0
        return 2 * self.layers * (self.message_latency_seconds + self.sum_latency_seconds) + moves


class LaneSeconds(msgspec.Struct, frozen=True):
    """Seconds of one lane step over all layers.

    Attributes:
        s_rank: On the S-rank.
        r_ranks: On each R-rank, [R-ranks].
        wire: On the wire, both ways.
        latency: Of the messages, in which nothing is used.
        move: Handing on what a stage gives the next, which each does once; of copies in rotation, all of that.
    """

    s_rank: float
    r_ranks: NDArray[np.float64]
    wire: float
    latency: float
    move: float = 0.0


def _times(costs: _Seconds, factor: float) -> _Seconds:
    """Return costs whose own seconds are so many times as large."""
    own = {name: getattr(costs, name) for name in costs.__struct_fields__ if "seconds" in name}
    return msgspec.structs.replace(costs, **{name: (factor * np.array(x)).tolist() for name, x in own.items()})


def _interpolated(sizes: Sequence[int], seconds: Sequence[float], size: float) -> float:
    """Return the seconds at `size`, linear between the sizes and beyond the last; 0 for no tokens.

    Beyond the last the slope is that of the last two sizes, or of the first and the last if that is steeper: the true
    seconds are flat while weights are read and then rise, so a flat or falling end is noise of the measurement.
    """
    if not size:
        return 0.0
    if size <= sizes[-1]:
        return float(np.interp(size, sizes, seconds))
    slopes = ((seconds[-1] - seconds[i]) / (sizes[-1] - sizes[i]) for i in (-2, 0))
    return seconds[-1] + max(*slopes, 0.0) * (size - sizes[-1])
