"""The operators at which a graph is cut: each mixes tokens of a sequence, by attention or by a recurrence."""

from __future__ import annotations

from collections.abc import Sequence

from torch import fx

from hpcdecode.model.frontend.meta import tensor_meta
from hpcdecode.model.frontend.operators import ATTEND, PROJECTIONS
from hpcdecode.model.frontend.ops import AttendArguments
from hpcdecode.model.frontend.recurrent import RECURRENT, RecurArguments

MIXERS = RECURRENT | {ATTEND}


def mixers(nodes: Sequence[fx.Node]) -> list[fx.Node]:
    """Return those of `nodes` that mix tokens, in order."""
    return [n for n in nodes if n.target in MIXERS]


def recur_arguments(mixer: fx.Node) -> RecurArguments:
    """Return the arguments of a recurrence."""
    return RecurArguments.of(mixer, tensor_meta(mixer).one_token[-1])


def rows_of(mixer: fx.Node) -> list[fx.Node]:
    """Return the tensors of which every token brings a row: q, k and v, and the decay and beta of a recurrence."""
    if mixer.target is ATTEND:
        return AttendArguments.of(mixer).rows
    return recur_arguments(mixer).rows


def feeds_mixer(node: fx.Node) -> bool:
    """Return whether an attention or a recurrence reads what comes of a tensor, without a projection in between."""
    pending, seen = [node], {node}
    while pending:
        users = set(pending.pop().users) - seen
        if any(user.target in MIXERS for user in users):
            return True
        pending += (user for user in users if user.target not in PROJECTIONS)
        seen |= users
    return False
