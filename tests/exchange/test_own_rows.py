"""Rows of members' shares that can be other than zeros: which there are, their sum, the way with the fewest bytes."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from hpcdecode.exchange.own_rows import OwnRows


@pytest.mark.parametrize(
    ("owners", "members", "counts", "way"),
    [
        ([[0], [1], [1]], 2, [1, 2], "rows"),  # one expert a token
        ([[0, 1], [1, 0], [0, 1]], 2, [3, 3], "rows"),  # all rows of two members: one message instead of two
        ([[0, 1], [1, 2], [3, 0]], 4, [2, 2, 1, 1], "columns"),
        ([[2, 2], [2, 2], [1, 1]], 4, [0, 1, 2, 0], "rows"),  # a token's experts are on one member
        ([[0, 1, 2]], 3, [1, 1, 1], "all"),
    ],
)
def test_the_way_with_the_fewest_bytes(owners, members, counts, way):
    rows = OwnRows(np.array(owners), members)
    assert rows.counts.tolist() == counts and rows.way == way


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("members", "chosen"), [(2, 1), (2, 2), (3, 2), (4, 2), (3, 6)])
def test_rows_add_up_to_the_bits_of_all_rows(members, chosen, dtype):
    generator = torch.Generator().manual_seed(members)
    expert = torch.stack([torch.randperm(2 * members, generator=generator)[:chosen] for _ in range(23)])
    owners = (expert // 2).numpy()
    shares = [torch.randn(23, 7, generator=generator).to(dtype) for _ in range(members)]
    for member, share in enumerate(shares):
        share[:, 0] = -0.0
        share[torch.from_numpy(~(owners == member).any(1))] = 0.0
    rows, expected = OwnRows(owners, members), shares[0].float()
    for share in shares[1:]:
        expected = expected + share.float()
    found = rows.added([rows.of(member, share) for member, share in enumerate(shares)])
    assert torch.equal(found.view(torch.int32), expected.view(torch.int32))
