"""A partition by head of latent attention: each R-rank has all of K, which its query heads share."""

from __future__ import annotations

import pytest
import torch

from hpcdecode.attention.shapes import LayerShape
from hpcdecode.errors import UserError
from hpcdecode.exchange.base import joined, side_by_side
from hpcdecode.exchange.partition import Partition

WHOLE = LayerShape(1, 40, 32, 6, 0.2, latent=True)


def test_query_heads_are_dealt_out():
    partition = Partition("head", 3)
    partition.check([WHOLE])
    own = partition.shape(WHOLE)
    assert (own.kv_heads, own.q_heads, own.kv_columns, own.row_columns) == (1, 2, 40, 2 * 40 + 40)
    assert [partition.heads(WHOLE, rank) for rank in range(3)] == [slice(0, 2), slice(2, 4), slice(4, 6)]
    columns = partition.columns(WHOLE, 1)
    assert columns.rows == (slice(80, 160), slice(0, 40), slice(0, 0)) and columns.o == slice(64, 128)


def test_query_heads_that_cannot_be_dealt_evenly_are_refused():
    with pytest.raises(UserError, match=r"divides the model's heads \(6\), got 4"):
        Partition("head", 4).check([WHOLE])
    Partition("request", 4).check([WHOLE])


def test_values_in_keys_need_no_columns():
    rows = torch.arange(24.0).view(3, 8)
    q, k, v = rows[:, :5], rows[:, 5:], rows[:, 5:5]
    assert side_by_side(q, k, v).data_ptr() == rows.data_ptr()
    assert torch.equal(joined(q, k, v), rows)
    assert torch.equal(joined(k, v), rows[:, 5:])
    assert torch.equal(joined(q.clone(), k, v), rows)
