"""What `hpcdecode calibrate` writes: a model's costs on a machine."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any

import msgspec
from msgspec.structs import replace

from hpcdecode.attention.recurrent_shapes import RecurrentShape
from hpcdecode.attention.shapes import LayerShape, state_dtype_of
from hpcdecode.errors import UserError, first_line
from hpcdecode.planning.cost import Cost
from hpcdecode.planning.kv_unit import KvUnit
from hpcdecode.planning.layer_work import of_member
from hpcdecode.planning.seen_tokens import Seconds

_MOST_RANKS = 1 << 20
_MOST_ELEMENTS = 1 << 24  # of a head, and heads of a layer


class MemberCosts(msgspec.Struct, frozen=True):
    """What groups of some members cost, with all ranks of the job at work in groups of as many.

    Attributes:
        members: K, that share a model.
        latency_seconds: Of a sum, however few tokens it is of.
        seconds_per_token: Of a sum beyond that.
        replica: Costs of a group whose members have both roles, with its work for sums within the slices; None if it
            was not measured.
        split: Times that steps of a group beside R-ranks take as long as their forecast; None if it was not measured.
    """

    members: Annotated[int, msgspec.Meta(ge=2, le=_MOST_RANKS)]
    latency_seconds: Seconds
    seconds_per_token: Seconds
    replica: Cost | None = None
    split: Annotated[float, msgspec.Meta(gt=0)] | None = None

    def with_sums_apart(self, cost: Cost) -> Cost:
        """Return a cost whose slices have sums within them, with these taken out; they are half of a slice at most."""
        waits, each = (2 * cost.layers * seconds for seconds in (self.latency_seconds, self.seconds_per_token))
        steps = list(zip(cost.slice_tokens, cost.slice_seconds, strict=True))
        share = min(1.0, *(seconds / 2 / max(waits + each * n, 1e-12) for n, seconds in steps))
        return replace(
            cost,
            slice_seconds=[seconds - share * (waits + each * n) for n, seconds in steps],
            sum_latency_seconds=self.latency_seconds * share,
            sum_seconds_per_token=each * share,
        )


class Profile(msgspec.Struct, frozen=True):
    """Measured costs, and what they were measured with.

    Attributes:
        machine: Facts of the machine, as `report.benchmark.machine` returns them.
        model: The model directory.
        dtype: Data type of weights and activations.
        kv_dtype: Data type of the KV cache.
        ranks: Number of ranks; 1 for one process.
        cost: Costs of the split into one S-rank and `ranks` - 1 R-ranks; of the process if it is one.
        spread: Quartiles of the passes' steps over their median, by load.
        replica: Costs of one of `ranks` processes of both roles, all at work; None if they were not measured.
        token_bytes: Bytes of K and V of a token; 0 if they are not known.
        sums: Costs of groups, for each number of members that model and ranks allow.
        shapes: Of the model's layers; none in profiles of the time before states were counted.
    """

    machine: dict[str, Any]
    model: str
    dtype: str
    kv_dtype: str
    ranks: Annotated[int, msgspec.Meta(ge=1, le=_MOST_RANKS)]
    cost: Cost
    spread: dict[str, tuple[float, float]]
    replica: Cost | None = None
    token_bytes: Annotated[float, msgspec.Meta(ge=0)] = 0.0
    sums: list[MemberCosts] = []
    shapes: list[LayerShape | RecurrentShape] = []

    @property
    def alone(self) -> Cost | None:
        """Return the costs of a rank of both roles, with as many others at work beside it as there are ranks."""
        return self.cost if self.ranks == 1 else self.replica

    @property
    def state_dtype(self) -> str:
        """Return the data type of the recurrent states that were measured, float32 if there were none."""
        return state_dtype_of(self.shapes)

    @property
    def tensor_parallel(self) -> list[int]:
        """Return the numbers of members of a group whose costs are known."""
        return [1, *(each.members for each in self.sums)]

    def unit(self, tp: int) -> KvUnit:
        """Return how sequences count on an R-rank of a member of `tp`."""
        if self.shapes:
            return KvUnit.of(of_member(self.shapes, tp), self.kv_dtype, windowed=True)
        return KvUnit(self.token_bytes / tp)

    def of_member(self, cost: Cost, tp: int) -> Cost:
        """Return the cost of a member of a group of `tp`, from that of an S-rank with the whole model.

        Groups of both roles are as they were measured. Others are forecast: a member has 1 / tp of what grows with
        weights, heads or bytes, and two sums a layer. Since what a step costs beside the products shrinks less, and
        members wait for each other, all of it is multiplied by what was measured of such groups, if they were.
        """
        found = next((each for each in self.sums if each.members == tp), None)
        if found is None:
            assert tp == 1, f"expected one of {self.tensor_parallel} members, got {tp}"
            return cost
        chosen = cost.chosen and cost.chosen.of_member(tp)
        windows = tuple(window.of_member(tp) for window in cost.windows)
        if found.replica is not None and not self._split(cost):
            return found.with_sums_apart(replace(found.replica, chosen=chosen, windows=windows))
        forecast = replace(
            cost,
            slice_seconds=[seconds / tp for seconds in cost.slice_seconds],
            logits_seconds_at=[seconds / tp for seconds in cost.logits_seconds_at],
            attend_seconds_per_cached_token=cost.attend_seconds_per_cached_token / tp,
            attend_seconds_per_sequence=cost.attend_seconds_per_sequence / tp,
            prefill_seconds_per_pair=cost.prefill_seconds_per_pair / tp,
            wire_seconds_per_token=cost.wire_seconds_per_token / tp,
            append_seconds_per_prompt_token=cost.append_seconds_per_prompt_token / tp,
            shared_core_fraction=cost.shared_core_fraction * (tp if self._split(cost) else 1),
            sum_latency_seconds=found.latency_seconds,
            sum_seconds_per_token=2 * cost.layers * found.seconds_per_token,
            chosen=chosen,
            windows=windows,
        )
        return forecast.times(found.split) if found.split and self._split(cost) else forecast

    def _split(self, cost: Cost) -> bool:
        """Return whether a cost is that of a split, whose members' ranks share cores with each other, if any do."""
        return self.ranks > 1 and cost is self.cost


def read(path: str) -> Profile:
    """Read a profile.

    Raises:
        UserError: If the file is no profile.
    """
    try:
        profile = msgspec.json.decode(Path(path).read_bytes(), type=Profile)
        problem = _problem(profile)
    except (OSError, msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        problem = first_line(error)
    if problem:
        raise UserError(f"{path}: expected a profile that hpcdecode calibrate wrote: {problem}; calibrate again")
    return profile


def _problem(profile: Profile) -> str:
    """Return what is wrong with a profile whose fields have their types, or nothing."""
    groups = [(f"sums[{i}].replica", each.replica) for i, each in enumerate(profile.sums)]
    for name, cost in (("cost", profile.cost), ("replica", profile.replica), *groups):
        if cost is not None and (problem := _cost_problem(cost)):
            return f"{problem} - at `$.{name}`"
    if profile.shapes and len(profile.shapes) != profile.cost.layers:
        return f"expected shapes of {profile.cost.layers} layers, got {len(profile.shapes)}"
    if any(_odd(shape) for shape in profile.shapes):
        return "expected shapes of layers with heads and elements, got others"
    return ""


def _cost_problem(cost: Cost) -> str:
    """Return what is wrong with costs that were measured, or nothing."""
    tables = {
        "body": (cost.slice_tokens, cost.slice_seconds),
        "logits": (cost.logits_tokens, cost.logits_seconds_at),
        "paged_seconds_at": (cost.paged_tokens, cost.paged_seconds_at),
    }
    for name, (sizes, seconds) in tables.items():
        if len(sizes) != len(seconds):
            return f"{name}: expected seconds of {len(sizes)} sizes, got {len(seconds)}"
        if any(after <= before for before, after in pairwise(sizes)):
            return f"{name}: expected seconds of ascending sizes, got {sizes}"
    return "" if min(cost.slice_seconds) > 0 else "body: expected steps that take time, got one of 0 seconds"


def _odd(shape: LayerShape | RecurrentShape) -> bool:
    """Return whether no layer has a shape."""
    if isinstance(shape, RecurrentShape):
        sizes = shape.k_heads, shape.k_dim, shape.v_dim, shape.taps, shape.decay_dim
        return not (
            all(0 <= size <= _MOST_ELEMENTS for size in sizes) and shape.heads >= 1 and shape.element_bytes >= 1
        )
    sizes = shape.kv_heads, shape.q_heads, shape.k_dim, shape.v_dim, shape.window or 1
    return not all(1 <= size <= _MOST_ELEMENTS for size in sizes) or shape.q_heads % shape.kv_heads != 0
