"""On a GPU: rows and outputs cross through pinned memory, behind what is computed and before what needs them."""

from __future__ import annotations

import pytest
import torch

from hpcdecode.attention.shapes import LayerShape
from hpcdecode.exchange.device import CudaDevice, CudaMemory
from hpcdecode.exchange.device_pieces import DevicePieces
from hpcdecode.exchange.partition import Partition
from hpcdecode.exchange.staging import DeviceLink, Outbox
from tests.support.answering_link import CASES, AnsweringLink, compute, expected_of, plan_of, widths

GPU = torch.device("cuda", 0)
SHAPE = LayerShape(8, 64, 64, 32, 1.0)


def test_rows_go_to_their_r_rank_and_outputs_to_their_rows():
    """Behind products that take a while, and again and again in the same memory."""
    partition, device = Partition("request", 3), CudaDevice(GPU)
    link = AnsweringLink([SHAPE] * 4, partition, CudaMemory(torch.device("cpu")))
    lane, slow = DeviceLink(link, Outbox(), device), torch.randn(4096, 4096, device=GPU)
    found, wanted, prompts = [], [], []
    for owners, apart in CASES:
        plan = plan_of(owners * 40, apart)
        lane.send_plan(plan)
        tokens = plan.decode_tokens + plan.prefill_tokens
        for _ in range(4):
            whole = torch.randn(tokens, SHAPE.row_columns)
            there = whole.to(GPU)
            slow = slow @ slow / 64
            rows = [torch.full((tokens, w), float("nan"), device=GPU) for w in widths(SHAPE)]
            compute(rows, there, SHAPE)
            o = torch.full((tokens, SHAPE.out_columns), float("nan"), device=GPU)
            lane.send_rows(len(found) % 4, rows, o)
            while not lane.Test():
                pass
            lane.recv_output()
            found.append(o + 0)
            output, sent = expected_of(whole, SHAPE, plan, partition)
            wanted.append(output)
            prompts += sent
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one.cpu(), other, rtol=0, atol=0, equal_nan=True)
    assert all(torch.equal(one, other) for one, other in zip(link.prompts, prompts, strict=True))


@pytest.mark.parametrize("pinned", [True, False])
def test_pieces_of_host_memory_are_attended_to_on_the_gpu(pinned):
    pieces = DevicePieces(CudaDevice(GPU))
    for n in (3, 500, 40):
        rows, prompts = (torch.randn(n, c, pin_memory=pinned) for c in (256, 128))
        out = torch.full((n, 64), float("nan"), pin_memory=pinned)
        mark = pieces.attend(lambda x, y, to: to.copy_(x[:, :64] + y[:, :64]), rows, prompts, out)
        while not mark.Test():
            pass
        assert torch.equal(out, rows[:, :64] + prompts[:, :64])
