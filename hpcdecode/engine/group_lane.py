"""A lane of a group as one of its members sees it: what home orders, what all add up, and what home gets of it."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from typing import TYPE_CHECKING, NamedTuple, Protocol, TypeVar

import numpy as np
import torch
from torch import Tensor

from hpcdecode.engine.model_inputs import ModelInputs, StepOrder
from hpcdecode.engine.programs import Waiting, waiting
from hpcdecode.model.run.bound_slice import MemberShare, Summed, alone
from hpcdecode.model.run.head_input import LmHeadInput
from hpcdecode.model.run.lm_head import Largest
from hpcdecode.mpi.wait import Waitable
from hpcdecode.schedule.plan import Plan
from hpcdecode.schedule.routes import Rotation
from hpcdecode.system.timeline import Timeline

if TYPE_CHECKING:
    from mpi4py import MPI

    from hpcdecode.exchange.own_rows import OwnRows
    from hpcdecode.exchange.sums import Sums

T = TypeVar("T")
_ORDER, _HANDED = 1, 2  # message tags


class SliceInput(NamedTuple):
    """What a slice takes: the output of the attention before it [T, out_columns], if there is one, and the context."""

    o: Tensor | None
    context: tuple[Tensor, ...]


class GroupLane(Protocol):
    """A member's end of a lane. Its methods but `order` and `hand_on` are parts of the lane's program."""

    def order(self, plan: Plan, inputs: ModelInputs | None, forgotten: Sequence[int] = ()) -> None:
        """Tell the other members what to run; inputs: on the host, None if the model does not run."""

    def take_over(self, inputs: ModelInputs) -> Waiting[SliceInput]:
        """Return what the first layer of this stage takes."""

    def hand_on(self, o: Tensor, context: tuple[Tensor, ...]) -> None:
        """Give the next stage what its first layer takes."""

    def summed(self, work: Summed[T]) -> Waiting[T]:
        """Run work with the members' sums."""

    def logits(self, head: LmHeadInput) -> Waiting[Tensor]:
        """Return the logits [L, vocab] on home, and this member's part of them elsewhere."""

    def largest(self, head: LmHeadInput) -> Waiting[Tensor | None]:
        """Return the tokens with the largest logits, int64 [L], on home.

        Return None if that would take a search of all logits.
        """


class OneMember:
    """A lane of a group of one S-rank: there is nobody to tell, and nothing to add up."""

    def order(self, plan: Plan, inputs: ModelInputs | None, forgotten: Sequence[int] = ()) -> None:
        """Do nothing."""

    def take_over(self, inputs: ModelInputs) -> Waiting[SliceInput]:
        """Return what the first layer takes."""
        yield from ()
        return SliceInput(None, inputs.tokens.context)

    def hand_on(self, o: Tensor, context: tuple[Tensor, ...]) -> None:
        """Raise NotImplementedError: there is no next stage."""
        raise NotImplementedError("a group of one member has one stage")

    def summed(self, work: Summed[T]) -> Waiting[T]:
        """Run work."""
        yield from ()
        return alone(work)

    def logits(self, head: LmHeadInput) -> Waiting[Tensor]:
        """Return the logits."""
        yield from ()
        return head.logits()

    def largest(self, head: LmHeadInput) -> Waiting[Tensor | None]:
        """Return the tokens with the largest logits, or None if that would take a search of all of them."""
        yield from ()
        found = head.largest()
        return None if found is None else found.ids


class MpiGroupLane:
    """A lane of a group of several members, of which the first is home.

    Args:
        comm: of the members, for this lane alone.
        sums: of the members of this stage, for this lane alone; None if it has one.
        tp: members of a stage or copy of the model.
        route: of the lanes through the copies.
        columns: of the logits, by member of this stage; nothing if each member computes all of them.
        timeline: of this rank.
        alike: whether the members of the stage compute with the same code, so that their routers agree to the bit.

    Attributes:
        choices: of experts by a router, that each member of this stage computed, [tp].
        copy: number of this member's copy of the model.
        at_home: whether this member is in home's stage, which ends with the logits.
    """

    def __init__(
        self,
        comm: MPI.Intracomm,
        sums: Sums | None,
        tp: int,
        route: Rotation,
        columns: Sequence[int],
        timeline: Timeline,
        *,
        alike: bool = True,
    ):
        self.timeline, self.route, self.alike, self._tp = timeline, route, alike, tp
        self.copy, self.at_home = comm.rank // tp if route.copies > 1 else 0, comm.rank < tp
        self.comm, self.columns = comm, np.array(columns)
        self.sums = sums
        self.choices = np.zeros(tp, np.int64)
        self._before, self._after = comm.rank + tp, comm.rank - tp  # members of the stages before and after
        self._sent: list[MPI.Request] = []

    def order(
        self,
        plan: Plan,
        inputs: ModelInputs | None,
        forgotten: Sequence[int] = (),
        members: Sequence[int] | None = None,
    ) -> None:
        """Send an order to every other member, or only to some; it waits for none."""
        from hpcdecode.mpi.message import post

        order = StepOrder.of(plan, inputs, forgotten)
        others = range(1, self.comm.size) if members is None else members
        self._keep([post(self.comm, member, _ORDER, order) for member in others])

    def receive(self) -> Waiting[StepOrder]:
        """Return home's next order."""
        from hpcdecode.mpi.message import arriving

        return (yield from waiting("idle", arriving(self.comm, 0, _ORDER, StepOrder)))

    def take_over(self, inputs: ModelInputs) -> Waiting[SliceInput]:
        """Return what the first layer of this stage takes: the step's tokens, or what the stage before hands on."""
        if self._before >= self.comm.size:
            return SliceInput(None, inputs.tokens.context)
        o, *context = yield from self._receive_tensors(self._before, inputs.tokens.ids.device)
        return SliceInput(o, tuple(context))

    def hand_on(self, o: Tensor, context: tuple[Tensor, ...]) -> None:
        """Send the next stage the output of the last attention here, and the context; it waits for nothing."""
        self._send_tensors(self._after, [o, *context])

    def send(self, copy: int, tensors: Sequence[Tensor]) -> None:
        """Send tensors to this member's counterpart in a copy of the model; it waits for nothing."""
        self._send_tensors(self._counterpart(copy), tensors)

    def receive_from(self, copy: int, device: torch.device) -> Waiting[list[Tensor]]:
        """Return on a device what this member's counterpart in a copy of the model sends."""
        return self._receive_tensors(self._counterpart(copy), device)

    def _counterpart(self, copy: int) -> int:
        return copy * self._tp + self.comm.rank % self._tp

    def _send_tensors(self, member: int, tensors: Sequence[Tensor]) -> None:
        from hpcdecode.exchange.tensors import send_tensors

        self._keep(send_tensors(self.comm, member, _HANDED, tensors))

    def _receive_tensors(self, member: int, device: torch.device) -> Waiting[list[Tensor]]:
        from hpcdecode.exchange.tensors import receive_tensors

        return (yield from waiting("wait", receive_tensors(self.comm, member, _HANDED, device)))

    def summed(self, work: Summed[T]) -> Waiting[T]:
        """Run work with the members' sums."""
        total: Tensor | None = None
        while True:
            try:
                share = next(work) if total is None else work.send(total)
            except StopIteration as end:
                result: T = end.value
                return result
            assert self.sums is not None, "sums: expected several members"
            total = yield from self._joint(self.sums.add(share.x, self._own_rows(share)))

    def _own_rows(self, share: MemberShare) -> OwnRows | None:
        """Count whose experts were chosen; return the rows of members' shares, if only those are to be sent."""
        owners = share.owners(self._tp)
        if owners is None:
            return None
        from hpcdecode.exchange.own_rows import OwnRows

        self.choices += np.bincount(owners.reshape(-1), minlength=self._tp)
        return OwnRows(owners, self._tp) if share.own_rows and self.alike else None

    def logits(self, head: LmHeadInput) -> Waiting[Tensor]:
        """Return the logits on home; this member's part elsewhere."""
        part = head.logits()
        if self.sums is None or not len(self.columns):
            return part
        parts = yield from self._joint(self.sums.gather(part, self.columns))
        return torch.cat(parts, dim=1) if parts else part

    def largest(self, head: LmHeadInput) -> Waiting[Tensor | None]:
        """Return the tokens with the largest logits on home, of equal ones the first."""
        found = head.largest()
        if self.sums is None or not len(self.columns):
            return None if found is None else found.ids
        own = Largest.of(head.logits()) if found is None else found
        pairs = torch.stack([own.values.double(), own.ids.double()])  # both exact in float64
        parts = yield from self._joint(self.sums.gather(pairs, np.full(len(self.columns), pairs.shape[1])))
        if not parts:
            return None
        values, ids = torch.stack(parts).unbind(1)
        firsts = torch.from_numpy(np.cumsum(self.columns) - self.columns).to(ids.device)
        best = values.argmax(dim=0)
        return (ids.long() + firsts[:, None]).gather(0, best[None]).squeeze(0)

    def _joint(self, requests: Generator[Waitable, None, T]) -> Waiting[T]:
        """Wait for what members do together; go on with the operation that it is part of."""
        operation, _ = self.timeline.current
        self.timeline.enter("sum")
        result = yield from waiting("wait", requests)
        self.timeline.enter(operation)
        return result

    @property
    def comms(self) -> list[MPI.Intracomm]:
        """The communicators of this lane."""
        return [self.comm] if self.sums is None else [self.comm, self.sums.comm]

    def close(self) -> None:
        """Complete what is under way after the stop plan, and free the communicators; every member calls this."""
        from hpcdecode.mpi.wait import wait

        for request in self._sent:
            wait(request)
        for comm in self.comms:
            comm.Free()

    def _keep(self, requests: Sequence[MPI.Request]) -> None:
        """Keep requests of messages until these are sent."""
        self._sent = [request for request in self._sent if not request.Test()]
        self._sent += requests
