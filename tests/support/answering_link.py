"""A lane whose R-ranks answer at once, over memory that a device fills, and what must come of it."""

from __future__ import annotations

import numpy as np
import torch

from hpcdecode.attention.shapes import LayerShape
from hpcdecode.exchange.base import PackedRows
from hpcdecode.exchange.local import LocalParcel
from hpcdecode.exchange.shares import Share
from hpcdecode.schedule.plan import Plan

# R-ranks of decode rows, and R-rank, slot and tokens of prompts, of a few steps
CASES = [([0, 1, 0, 2, 1, 1], []), ([0, 0, 1, 2], [(2, 9, 3)]), ([], [(0, 9, 2), (1, 8, 4)]), ([1, 1], [(0, 9, 1)])]


class AnsweringLink:
    """A lane that R-ranks answer at once: the columns of a row, repeated, plus one.

    Attributes:
        sent: Whole rows of prompts that came, [k | v], by R-rank.
        order: Of what happened.
    """

    def __init__(self, shapes, partition, memory):
        self.shapes, self.partition, self.memory = shapes, partition, memory
        self.prompts, self.order, self.pokes = [], [], 0
        self.expected = set()

    def send_plan(self, plan):
        parts = range(self.partition.parts)
        self.shares = [Share(plan, self.partition.named(rank)) for rank in parts]

    def parcels(self, layer, dtype):
        shape, found = self.shapes[layer], []
        own = self.partition.shape(shape)
        for rank, share in enumerate(self.shares):
            for piece in share.pieces_of(own):
                columns = self.partition.columns(shape, rank) if self.partition.by_head else None
                sent = self.memory.empty(piece.elements(own), dtype)
                answered = self.memory.empty(len(piece.decode_rows) * own.out_columns, dtype)
                found.append(LocalParcel([PackedRows(piece, columns, sent, answered)]))
        return found

    def begin(self, layer):
        assert not self.expected
        self.layer = layer

    def expect(self, parcel):
        (packed,) = parcel.packed
        packed.answered.fill_(float("nan"))  # may be overwritten from now on
        self.expected.add(id(parcel))

    def send(self, parcel):
        self.order.append("send")
        (packed,) = parcel.packed
        own = self.partition.shape(self.shapes[self.layer])
        n, m = len(packed.piece.decode_rows), len(packed.piece.prefill_rows)
        rows = packed.sent[: n * own.row_columns].view(n, own.row_columns)
        assert not packed.sent.isnan().any(), "sent before it was there"
        if m:
            self.prompts.append(packed.sent[n * own.row_columns :].view(m, -1).clone())
        packed.answered.copy_((rows.repeat(1, 4)[:, : own.out_columns] + 1).flatten())

    def exchange(self, parcel):
        self.expect(parcel)
        self.send(parcel)
        self.expected.remove(id(parcel))

    def Test(self):
        return True

    def take_answers(self):
        self.order.append("take")

    def poke(self):
        self.pokes += 1


def plan_of(owners, prompts):
    first, rows = len(owners), []
    for rank, slot, tokens in prompts:
        rows.append((rank, slot, first, tokens))
        first += tokens
    return Plan(
        decode=np.array([(rank, slot) for slot, rank in enumerate(owners)], np.int32).reshape(-1, 2),
        prefill=np.array(rows, np.int32).reshape(-1, 4),
    )


def widths(shape):
    if isinstance(shape, LayerShape):
        return [shape.q_columns, shape.k_columns, shape.v_columns]
    return [width for width in shape.widths if width]


def expected_of(whole, shape, plan, partition):
    """The output of a layer, NaN where R-ranks do not answer, and the rows of prompts that come to them in order."""
    blocks, prompts = whole.split(widths(shape), 1), []
    o = torch.full((len(whole), shape.out_columns), float("nan"))
    for rank in range(partition.parts):
        columns, own = partition.columns(shape, rank), partition.shape(shape)
        rows = [x[:, part] for x, part in zip(blocks, columns.rows, strict=True)]
        for piece in Share(plan, partition.named(rank)).pieces_of(own):
            answered = torch.cat(rows, 1)[piece.decode_rows].repeat(1, 4)[:, : own.out_columns] + 1
            o[torch.from_numpy(piece.decode_rows), columns.o] = answered
            if len(piece.prefill_rows):
                prompts.append(torch.cat(rows[1:], 1)[piece.prefill_rows])
    return o, prompts


def compute(rows, whole, shape):
    for row, part in zip(rows, whole.split(widths(shape), 1), strict=True):
        row.copy_(part)
