"""Rows of several R-ranks are packed by one gather and unpacked by one scatter, however they lie in memory."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from hpcdecode.attention.shapes import LayerShape
from hpcdecode.exchange import packing as module
from hpcdecode.exchange.base import side_by_side
from hpcdecode.exchange.device import PlainMemory
from hpcdecode.exchange.memory import RankMemory
from hpcdecode.exchange.packing import Packing
from hpcdecode.exchange.partition import Partition
from hpcdecode.exchange.shares import Share
from hpcdecode.schedule.plan import Plan

HOST = torch.device("cpu")
WIDE, ODD = LayerShape(2, 8, 16, 4, 1.0), LayerShape(1, 3, 5, 2, 1.0)  # rows of o: 128 and 20 bytes


@pytest.fixture(autouse=True, params=["few", "many"])
def way(request, monkeypatch):
    """Few rows are copied by a call of our own, many by torch's."""
    if request.param == "many":
        monkeypatch.setattr(module, "_are_few", lambda packed, device: False)
    return request.param


def memory() -> RankMemory:
    none = torch.empty(0, dtype=torch.uint8)
    return RankMemory(torch.bfloat16, (none, none), PlainMemory())


def rows_of(shape: LayerShape, tokens: int, beside: bool) -> list[torch.Tensor]:
    qkv = torch.randn(tokens, shape.row_columns).bfloat16()
    kv = shape.kv_heads * shape.k_dim
    parts = qkv.split([shape.q_columns, kv, shape.kv_columns - kv], dim=1)
    assert side_by_side(*parts) is not None
    return list(parts) if beside else [part.clone() for part in parts]


@pytest.mark.parametrize("owners", [[0, 1, 0, 2, 1, 1], [0, 0, 1, 2], [2, 1, 0]])
@pytest.mark.parametrize("beside", [True, False])
@pytest.mark.parametrize("shape", [WIDE, ODD])
def test_rows_of_several_r_ranks_cross_at_once(shape, beside, owners):
    plan = Plan(decode=np.array([(rank, slot) for slot, rank in enumerate(owners)], np.int32))
    pieces = [Share(plan, rank).pieces[0] for rank in range(3)]
    messages = memory().messages(pieces, shape)
    packing = Packing(messages, None, HOST)
    q, k, v = rows_of(shape, len(owners) + 2, beside)
    packing.pack((q, k, v))
    for piece, message in zip(pieces, messages, strict=True):
        assert torch.equal(message.rows, torch.cat([q, k, v], dim=1)[piece.decode_rows])
        message.out.copy_(message.rows.repeat(1, 2)[:, : shape.out_columns])
    o = torch.full((len(owners) + 2, shape.out_columns), -7.0, dtype=torch.bfloat16)
    packing.unpack(o)
    assert torch.equal(o[: len(owners)], torch.cat([q, k, v, q, k, v], dim=1)[: len(owners), : shape.out_columns])
    assert (o[len(owners) :] == -7).all()


def test_a_piece_with_prompts_and_the_columns_of_an_r_rank():
    partition = Partition("head", 2)
    plan = Plan(
        decode=np.array([(0, 5), (0, 3)], np.int32),
        prefill=np.array([(0, 7, 2, 3)], np.int32),
    )
    q, k, v = rows_of(WIDE, 5, beside=True)
    for rank in range(2):
        (message,) = memory().messages(Share(plan, 0).pieces, partition.shape(WIDE))
        columns = partition.columns(WIDE, rank)
        Packing([message], columns, HOST).pack((q, k, v))
        own = [x[:, own] for x, own in zip((q, k, v), columns.rows, strict=True)]
        assert torch.equal(message.rows, torch.cat(own, dim=1)[:2])
        assert torch.equal(message.prompts, torch.cat(own[1:], dim=1)[2:])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_that_begin_anywhere_are_unpacked(dtype):
    """Memory of o that is not aligned as wide elements are."""
    plan = Plan(decode=np.array([(1, 0), (0, 1), (1, 2)], np.int32))
    none = torch.empty(0, dtype=torch.uint8)
    (message,) = RankMemory(dtype, (none, none), PlainMemory()).messages(Share(plan, 1).pieces, WIDE)
    message.out.copy_(torch.randn(message.out.shape))
    o = torch.zeros(3 * WIDE.out_columns + 1, dtype=dtype)[1:].view(3, WIDE.out_columns)
    Packing([message], None, HOST).unpack(o)
    assert torch.equal(o[[0, 2]], message.out) and (o[1] == 0).all()


def test_columns_that_do_not_follow_each_other(way):
    """Rows and outputs of any strides cross; more rows than there are do not."""
    plan = Plan(decode=np.array([(0, 0), (0, 1)], np.int32))
    (message,) = memory().messages(Share(plan, 0).pieces, WIDE)
    packing = Packing([message], None, HOST)
    q, k, v = (x.t().contiguous().t() for x in rows_of(WIDE, 2, beside=False))
    packing.pack((q, k, v))
    assert torch.equal(message.rows, torch.cat([q, k, v], dim=1))
    message.out.copy_(torch.randn(message.out.shape))
    o = torch.zeros(WIDE.out_columns, 2, dtype=torch.bfloat16).t()
    packing.unpack(o)
    assert torch.equal(o, message.out)
    if way == "few":
        with pytest.raises(IndexError, match="expected more than 1, got 1"):
            packing.pack((q[:1], k[:1], v[:1]))
        with pytest.raises(IndexError, match="expected more than 1, got 1"):
            packing.unpack(o[:1])
