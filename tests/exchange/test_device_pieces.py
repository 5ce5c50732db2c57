"""Pieces in host memory that a device attends to: copied there, attended and copied back, each behind the other."""

from __future__ import annotations

import pytest
import torch

from hpcdecode.exchange.device_pieces import DevicePieces
from tests.support.late_device import LateDevice, LateMemory


@pytest.mark.parametrize("seed", range(6))
def test_lanes_go_on_beside_each_other(seed):
    """Three lanes, each with a piece under way; sizes grow, and memory of pieces under way is not given to others."""
    device = LateDevice(seed)
    pieces, memory = DevicePieces(device), LateMemory(device)
    draw, under_way, done = torch.Generator().manual_seed(seed), {}, 0

    def attend(rows, prompts, out):
        assert not rows.isnan().any() and not prompts.isnan().any(), "read before they were there"
        out.copy_(rows[:, : out.shape[1]] * 2)

    for number in range(30):
        lane = number % 3
        while lane in under_way:
            mark, rows, out = under_way[lane]
            if mark.Test():
                assert torch.equal(out, rows[:, :4] * 2)
                del under_way[lane]
                done += 1
        n = 1 + number
        rows, prompts, out = (memory.empty(n * c, torch.float32).view(n, c) for c in (8, 6, 4))
        rows.copy_(torch.randn(n, 8, generator=draw))
        prompts.copy_(torch.randn(n, 6, generator=draw))
        under_way[lane] = pieces.attend(attend, rows, prompts, out), rows.clone(), out
    assert done == 27
    assert len(pieces._images) <= 4


def test_a_piece_of_prompts_alone_is_done_once_it_is_read():
    device = LateDevice()
    memory, seen = LateMemory(device), []
    prompts = memory.empty(12, torch.float32).view(2, 6).fill_(3)
    mark = DevicePieces(device).attend(lambda _, x, __: seen.append(x.clone()), prompts[:0, :], prompts, prompts[:0, :])
    assert not seen
    while not mark.Test():
        pass
    assert torch.equal(seen[0], torch.full((2, 6), 3.0))
