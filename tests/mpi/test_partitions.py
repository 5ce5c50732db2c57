"""`--partition head`: refused where KV heads cannot be dealt out, and what an R-rank has of a layer."""

from __future__ import annotations

import pytest

from hpcdecode.attention.shapes import LayerShape
from hpcdecode.errors import UserError
from hpcdecode.exchange.partition import Partition
from tests.support.worlds import FLAGS, PROMPTS

SHAPE = LayerShape(kv_heads=6, k_dim=4, v_dim=8, q_heads=12, scale=1.0, window=7)


def test_heads_that_r_ranks_cannot_share_out_are_refused(hpcdecode):
    result = hpcdecode("generate", PROMPTS, "-o", "out.h5", *FLAGS, "--partition", "head", "--layout", "split", ranks=3)
    assert result.returncode == 2, result.stderr
    assert "--partition head: expected a number of R-ranks that divides" in result.stderr and "got 2" in result.stderr


def slices_of(partition: Partition, rank: int) -> list[slice]:
    """The columns of q, k, v and o that an R-rank has."""
    columns = partition.columns(SHAPE, rank)
    return [*columns.rows, columns.o]


def test_by_head_r_ranks_have_all_columns_between_them():
    partition = Partition("head", 3)
    partition.check([SHAPE])
    assert partition.shape(SHAPE) == LayerShape(kv_heads=2, k_dim=4, v_dim=8, q_heads=4, scale=1.0, window=7)
    for widths in zip(*(slices_of(partition, rank) for rank in range(3)), strict=True):
        assert [part.start for part in widths] == [0, widths[0].stop, widths[1].stop]
    assert [part.stop for part in slices_of(partition, 2)] == [48, 24, 48, 96]
    assert partition.heads(SHAPE, 1) == slice(4, 8)
    assert partition.capacity([30, 20, 40]) == [20] and partition.named(2) == 0
    with pytest.raises(UserError, match=r"the model's heads \(6\), got 4"):
        Partition("head", 4).check([SHAPE])


def test_by_request_an_r_rank_has_whole_layers():
    partition = Partition("request", 4)
    partition.check([SHAPE])
    assert partition.shape(SHAPE) == SHAPE and partition.named(2) == 2 and partition.capacity([3, 4]) == [3, 4]
    assert [part.stop for part in slices_of(partition, 3)] == [48, 24, 48, 96]
