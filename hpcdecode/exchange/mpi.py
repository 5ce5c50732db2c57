"""Links over MPI: one communicator per lane, rank 0 of it the S-rank, the others its R-ranks.

Per step the S-rank sends every R-rank the plan. Per layer it sends one message for every piece of work that an
R-rank has, and gets one back when that is done. An R-rank without work in a step gets none. Memory is reused.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np
import torch
from mpi4py import MPI
from torch import Tensor

from hpcdecode.attention.shapes import LayerShape, MixerShape
from hpcdecode.exchange.base import Parcel
from hpcdecode.exchange.memory import LaneMemory, LaneSpec, Message
from hpcdecode.exchange.outgoing import Addressed, Outgoing, Requests, outgoing_of
from hpcdecode.exchange.returns import ReturnReceiver, ReturnTeller
from hpcdecode.exchange.shares import Share
from hpcdecode.mpi.wait import Waitable, wait
from hpcdecode.schedule.plan import Plan, wire_length

_PLAN, _QKV, _OUT = 1, 2, 3  # message tags


class MpiSLink:
    """The S-rank's end of a lane. All ranks of the lane give the same `spec`, but for its device.

    Attributes:
        shapes: of whole layers.
        graph: communicator of its own, for collectives, if it has one.
    """

    graph: MPI.Distgraphcomm | None = None

    def __init__(self, comm: MPI.Intracomm, spec: LaneSpec):
        self.comm, self.spec, self.shapes = comm, spec, spec.shapes
        self._memory = LaneMemory(comm, spec)
        self._plan = np.zeros(wire_length(spec.slots, comm.size - 1), np.int32)
        self._plans, self._sent, self._answers = Requests(), Requests(), Requests()
        self._kinds = kinds_of(spec.shapes)
        self._shares: list[Share] = []
        self._by_kind: dict[int, list[Outgoing]] = {}
        self._parcels: dict[int, list[Outgoing]] = {}
        self._current: list[Outgoing] = []
        returns = ReturnReceiver(comm, comm.size - 1 if spec.partition.by_head else 1)
        self._returns, self.take_swapped = returns, returns.take

    def send_plan(self, plan: Plan) -> None:
        """Send the plan of the lane's next step to every R-rank."""
        message = [self._plan[: self._share_out(plan)], MPI.INT32_T]
        self._plans.requests += [self.comm.Isend(message, rank, _PLAN) for rank in range(1, self.comm.size)]

    def _share_out(self, plan: Plan) -> int:
        """Write the plan to the wire, once that is free, and settle each R-rank's share; return the plan's length."""
        wait(self._plans)
        length = plan.encode(self._plan)
        partition, pieces = self.spec.partition, 1 if plan.collective else self.spec.pieces
        self._shares = [Share(plan, partition.named(rank), count=pieces) for rank in range(self.comm.size - 1)]
        self._by_kind, self._parcels = {}, {}
        self._returns.expect(self._shares)
        return length

    def follow_plan(self, plan: Plan) -> None:
        """Settle each R-rank's share of a plan that another S-rank sends them."""
        self._share_out(plan)

    def answers_prompts(self, layer: int) -> bool:
        """Return whether the layer keeps a state."""
        return not isinstance(self.spec.shapes[layer], LayerShape)

    def send_rows(self, layer: int, rows: Sequence[Tensor], o: Tensor) -> None:
        """Pack each piece and send it at once, so that its R-rank can begin."""
        self._begin(layer, o)
        for outgoing in self._current:
            outgoing.pack(rows)
            self.exchange(outgoing)

    def send_away(self, layer: int, rows: Sequence[Tensor]) -> None:
        """Pack each piece and send it at once; another S-rank gets the answer."""
        self._begin(layer, rows[0])
        for outgoing in self._current:
            outgoing.pack(rows)
            self.send(outgoing)

    def expect_output(self, layer: int, o: Tensor) -> None:
        """Expect the answers to what another S-rank sends."""
        self._begin(layer, o)
        for outgoing in self._current:
            self.expect(outgoing)

    def parcels(self, layer: int, dtype: torch.dtype) -> Sequence[Outgoing]:
        """Return what a device packs for a layer, in the order of sending."""
        kind = self._kinds[layer]
        if kind not in self._parcels:
            whole = self._outgoing(self.spec.shapes[kind])
            self._parcels[kind] = [part for outgoing in whole for part in outgoing.parts()]
        return self._parcels[kind]

    def begin(self, layer: int) -> None:
        """Take up a layer whose rows a device packs, once all of the last one have been sent."""
        wait(self._sent)

    def poke(self) -> None:
        """Let MPI go on with what is under way."""
        for requests in (self._sent, self._answers):
            if requests.requests:
                requests.Test()

    def _begin(self, layer: int, target: Tensor) -> None:
        """Take up a layer; target: where its output goes, or a tensor beside it if that is elsewhere."""
        kind = self._kinds[layer]
        if kind not in self._by_kind:
            self._by_kind[kind] = self._outgoing(self.spec.shapes[kind])
        self.begin(layer)
        self._target, self._current = target, self._by_kind[kind]

    def exchange(self, parcel: Parcel) -> None:
        """Send a parcel, which is packed, and expect the answers to it."""
        self.expect(parcel)
        self.send(parcel)

    def expect(self, parcel: Parcel) -> None:
        """Expect the answers to a parcel."""
        posts = outgoing_of(parcel).posts
        self._answers.requests += [self.comm.Irecv(message.answer, rank, _OUT) for rank, message in posts]

    def send(self, parcel: Parcel) -> None:
        """Send a parcel, which is packed."""
        posts = outgoing_of(parcel).posts
        self._sent.requests += [self.comm.Isend(message.qkv, rank, _QKV) for rank, message in posts]

    def Test(self) -> bool:
        """Return whether all answers have come."""
        return self._answers.Test()

    def take_answers(self) -> None:
        """Take note that all answers have come."""

    def recv_output(self) -> None:
        """Unpack the answers into o."""
        self.take_answers()
        for outgoing in self._current:
            for packing in outgoing.packings:
                packing.unpack(self._target)

    def close(self) -> None:
        """Complete what is under way after the stop plan, and free the communicator; every rank calls this."""
        wait(self._plans)
        wait(self._sent)
        self._returns.close()
        self._by_kind, self._parcels, self._current = {}, {}, []
        self._memory.close()
        self.comm.Free()

    def _outgoing(self, shape: MixerShape) -> list[Outgoing]:
        """Return what is packed for a layer of `shape`, in the order of sending."""
        partition = self.spec.partition
        return [Outgoing([posts], posts, shape, partition) for posts in self._groups(partition.shape(shape))]

    def _groups(self, own: MixerShape) -> list[list[Addressed]]:
        """Return the messages of a layer, of which an R-rank has `own`: piece by piece, so that all can begin soon.

        Those that lie side by side and have no prompts are together. They come first, as they go furthest.
        """
        memories, together = self._memory.ranks, -1
        pieces = [share.pieces_of(own) for share in self._shares]
        keys: dict[tuple[int, int], list[int]] = {}  # piece, R-rank or `together`: R-ranks
        for rank, of_rank in enumerate(pieces):
            for i, piece in enumerate(of_rank):
                alone = memories[rank].is_shared or len(piece.prefill_rows) or self.spec.partition.by_head
                keys.setdefault((i, rank if alone else together), []).append(rank)
        order = [(key[0], rank) for key in sorted(keys) for rank in keys[key]]
        found: dict[tuple[int, int], Message] = {}
        for memory in dict.fromkeys(memories):
            within = [(i, rank) for i, rank in order if memories[rank] is memory]
            messages = memory.messages([pieces[rank][i] for i, rank in within], own)
            found.update(zip(within, messages, strict=True))
        return [[Addressed(rank + 1, found[key[0], rank]) for rank in keys[key]] for key in sorted(keys)]


class MpiRLink:
    """An R-rank's end of a lane: the requests that its program waits for, and their data.

    Args:
        comm: of the lane.
        spec: as the S-rank has it, but for its device.
        first_slot: of the KV cache, the first that is the lane's.

    Attributes:
        shapes: of this R-rank's part of every layer.
        share: what the last plan asks of this R-rank.
        graph: communicator of its own, for collectives, if it has one.
    """

    share: Share
    graph: MPI.Distgraphcomm | None = None

    def __init__(self, comm: MPI.Intracomm, spec: LaneSpec, first_slot: int = 0):
        self.comm, self.spec, self.first_slot = comm, spec, first_slot
        self.shapes = list(map(spec.partition.shape, spec.shapes))
        self._memory = LaneMemory(comm, spec)
        self._plan = np.zeros(wire_length(spec.slots, comm.size - 1), np.int32)
        self._sent, self._teller = Requests(), ReturnTeller(comm)
        self.tell_swapped = self._teller.tell
        self._kinds = kinds_of(spec.shapes)
        self._by_kind: dict[int, list[Message]] = {}

    def recv_plan(self) -> Waitable:
        """Return a request that is complete once a plan has come."""
        return self.comm.Irecv([self._plan, MPI.INT32_T], 0, _PLAN)

    def take_plan(self) -> Plan:
        """Return the plan that has come."""
        plan = Plan.decode_from(self._plan)
        self.follow_plan(plan)
        return plan

    def follow_plan(self, plan: Plan) -> None:
        """Settle this R-rank's share of a plan that came over another link of the lane."""
        named = self.spec.partition.named(self.comm.rank - 1)
        self.share = Share(plan, named, self.first_slot, 1 if plan.collective else self.spec.pieces)
        self._by_kind = {}

    def recv_rows(self, layer: int) -> Iterator[tuple[MPI.Request, Message]]:
        """Yield a layer's messages, each with its request; to be read once that is complete."""
        messages = self.messages(layer)
        wait(self._sent)
        requests = [self.comm.Irecv(message.qkv, 0, _QKV) for message in messages]
        yield from zip(requests, messages, strict=True)

    def messages(self, layer: int) -> list[Message]:
        """Return a layer's messages."""
        kind = self._kinds[layer]
        if kind not in self._by_kind:
            self._by_kind[kind] = self._memory.ranks[0].messages(
                self.share.pieces_of(self.shapes[kind]), self.shapes[kind]
            )
        return self._by_kind[kind]

    def send_output(self, message: Message) -> None:
        """Send the output of a piece back."""
        self._sent.requests.append(self.comm.Isend(message.answer, 0, _OUT))

    def poke(self) -> None:
        """Let MPI go on with what is under way."""
        if self._sent.requests:
            self._sent.Test()
        self.comm.Iprobe(0, _QKV)

    def while_waiting(self, mark: Waitable) -> Waitable:
        """Return what is done when `mark` of a device is, and lets MPI go on until then."""
        return _Poking(mark, self.poke)

    def close(self) -> None:
        """Complete what is under way after the stop plan, and free the communicator; every rank calls this."""
        wait(self._sent)
        self._teller.close()
        self._by_kind = {}
        self._memory.close()
        self.comm.Free()


class _Poking:
    """A mark of a device; a test that finds it not done pokes MPI."""

    def __init__(self, mark: Waitable, poke: Callable[[], None]):
        self._mark, self._poke = mark, poke

    def Test(self) -> bool:
        done = self._mark.Test()
        if not done:
            self._poke()
        return done


def kinds_of(shapes: Sequence[MixerShape]) -> list[int]:
    """Return for every layer the first of its shape."""
    return [shapes.index(shape) for shape in shapes]
