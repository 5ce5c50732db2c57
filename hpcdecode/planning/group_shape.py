"""How a group of several S-ranks shares a model: what a member holds of it, and which shapes of groups can be."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from hpcdecode.planning.hardware import Device
from hpcdecode.planning.kv_unit import KvUnit
from hpcdecode.planning.layer_work import dealt_heads, of_member
from hpcdecode.planning.model_size import ModelSize
from hpcdecode.ranks.wishes import GroupShape

ONE = GroupShape(1, 1)  # an S-rank that holds the whole model
_MOST_STAGES = 32
_TRIED = 4  # times the members of the smallest shape that fits


def stage_shares(size: ModelSize, pp: int) -> tuple[float, ...]:
    """Return the share of the layers that each stage has.

    The last stage has the weights of the logits, too. As in jobs, a stage ends where the largest one is smallest; here
    all layers are of one size.
    """
    layer = size.layer_bytes / size.layers

    def largest(last: int) -> float:
        others = -(-(size.layers - last) // (pp - 1)) if pp > 1 else 0
        return max(others * layer, last * layer + size.head_bytes)

    last = min(range(1, size.layers - pp + 2), key=largest) if pp > 1 else size.layers
    others = [(size.layers - last + i) // (pp - 1) for i in range(pp - 1)]
    return tuple(layers / size.layers for layers in (*others, last))


def member_bytes(size: ModelSize, shape: GroupShape) -> float:
    """Return the bytes of weights that a member holds, the largest one of a group, with all of tables and embedding."""
    stages = [share * size.layer_bytes / shape.tp for share in stage_shares(size, shape.pp)]
    stages[-1] += size.head_bytes / shape.tp
    stages[0] += size.embedding_bytes(shape.tp, beside_head=shape.pp == 1)
    return max(stages) + size.table_bytes


def held_on(size: ModelSize, device: Device, shape: GroupShape) -> ModelSize:
    """Return the size with weights as members on a device hold them: on a GPU perhaps in bfloat16, if they fit."""
    wide = size.in_bfloat16
    fits = size.bits.if_needed and not device.is_host and member_bytes(wide, shape) <= device.room
    return wide if fits else size


def member_unit(size: ModelSize, shape: GroupShape, kv_dtype: str, windowed: bool = False) -> KvUnit:
    """Return how sequences count in a member's pool, the largest one of a group.

    A pool has the heads of its member, of states too, or the whole latent, in the layers of its stage.
    """
    return KvUnit.of(of_member(size.shapes, shape.tp), kv_dtype, max(stage_shares(size, shape.pp)), windowed)


def why_not(size: ModelSize, shape: GroupShape) -> str | None:
    """Return why a model cannot be shared so, or None if it can."""
    odd = _not_shared(dealt_heads(size.shapes), shape.tp)
    if odd is not None:
        kind = "heads of a layer" if size.keeps_states else "KV heads"
        return f"--tp {shape.tp}: expected a divisor of the {odd} {kind}, so that members have equally many"
    if not 1 <= shape.pp <= size.layers:
        return f"--pp {shape.pp}: expected 1 to {size.layers}, the layers of the model"
    return None


def _not_shared(heads: Iterable[int], tp: int) -> int | None:
    """Return the first of the numbers of heads that `tp` members cannot share evenly, or None if they can share all."""
    return next((each for each in heads if each % tp), None)


def shapes(size: ModelSize, ranks: int) -> Iterator[GroupShape]:
    """Yield the shapes that `ranks` ranks could have, the fewest members first, of these the fewest stages."""
    heads = set(dealt_heads(size.shapes))
    degrees = [tp for tp in range(1, ranks + 1) if _not_shared(heads, tp) is None]
    stages = [pp for pp in range(1, min(ranks, _MOST_STAGES, size.layers) + 1) if pp & (pp - 1) == 0]
    found = [GroupShape(tp, pp) for tp in degrees for pp in stages if tp * pp <= ranks]
    yield from sorted(found, key=lambda shape: (shape.size, shape.pp))


def smallest(size: ModelSize, room: float, ranks: int = 1 << 12) -> GroupShape | None:
    """Return the smallest shape whose members have their weights in `room` bytes, or None if there is none.

    Tensor parallelism goes before stages.
    """
    fitting = (shape for shape in shapes(size, min(ranks, 1 << 12)) if member_bytes(size, shape) <= room)
    return next(fitting, None)


def tried(size: ModelSize, room: float, ranks: int) -> list[GroupShape]:
    """Return the shapes that a planner tries: one rank if the model fits, and the smallest that fit and larger ones.

    Args:
        size: The model.
        room: Bytes for weights of a rank.
        ranks: Number of ranks that may hold weights.
    """
    least = smallest(size, room, ranks)
    if least is None:
        return []
    fitting = (s for s in shapes(size, ranks) if least.size <= s.size <= _TRIED * least.size)
    return [s for s in fitting if member_bytes(size, s) <= room]
