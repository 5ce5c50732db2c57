"""Rows and outputs of a device cross by one gather and one scatter, and nothing is sent or read before it is there."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from hpcdecode.attention.recurrent_shapes import RecurrentShape
from hpcdecode.attention.shapes import LayerShape
from hpcdecode.exchange.base import PackedRows
from hpcdecode.exchange.device import PlainMemory
from hpcdecode.exchange.local import LocalParcel
from hpcdecode.exchange.partition import Partition
from hpcdecode.exchange.staging import DeviceLink, Outbox
from tests.support.answering_link import CASES, AnsweringLink, compute, expected_of, plan_of, widths
from tests.support.late_device import LateDevice, LateMemory

WIDE, ODD = LayerShape(4, 8, 16, 8, 1.0), LayerShape(1, 3, 5, 2, 1.0)
LATENT = LayerShape(1, 24, 16, 4, 1.0, latent=True)
STATE = RecurrentShape(heads=4, k_heads=2, k_dim=8, v_dim=8, taps=4, delta=True, has_beta=True)
DTYPE = torch.float32


@pytest.mark.parametrize("kind", ["request", "head"])
@pytest.mark.parametrize("private", [False, True], ids=["host", "device"])
@pytest.mark.parametrize("shapes", [[WIDE, WIDE], [ODD, LATENT, ODD], [STATE, WIDE, STATE]])
@pytest.mark.parametrize("seed", range(4))
def test_rows_go_to_their_r_rank_and_outputs_to_their_rows(seed, shapes, private, kind):
    """Of a device that does all of it late, steps of several plans, slices and outputs included."""
    if kind == "head" and ODD in shapes:
        shapes = [LATENT, LATENT]
    partition = Partition(kind, 3 if kind == "request" else 2)
    device, outbox = LateDevice(seed), Outbox()
    link = AnsweringLink(shapes, partition, LateMemory(device, private))
    lane = DeviceLink(link, outbox, device)
    found, wanted, prompts = [], [], []
    for owners, apart in CASES:
        by_head = kind == "head"
        plan = plan_of([0] * len(owners) if by_head else owners, [(0, *a[1:]) if by_head else a for a in apart])
        lane.send_plan(plan)
        for layer, shape in enumerate(shapes):
            tokens = plan.decode_tokens + plan.prefill_tokens
            whole = torch.randn(tokens, shape.row_columns)
            rows = [torch.full((tokens, w), float("nan")) for w in widths(shape)]
            o = torch.full((tokens, shape.out_columns), float("nan"))
            device.tell(lambda rows=rows, whole=whole, shape=shape: compute(rows, whole, shape))
            lane.send_rows(layer, rows, o)
            while not lane.Test():
                pass
            lane.recv_output()
            taken = torch.empty_like(o)
            device.tell(lambda taken=taken, o=o: taken.copy_(o))
            found.append(taken)
            output, sent = expected_of(whole, shape, plan, partition)
            wanted.append(output)
            prompts += sent
    device.finish()
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0, equal_nan=True)
    assert len(prompts) == len(link.prompts) > 0
    assert all(torch.equal(one, other) for one, other in zip(link.prompts, prompts, strict=True))


def crossing(ranks, private=False, beside=True):
    """Counts of one layer of 64 sequences over so many R-ranks, after a first step."""
    device, outbox = LateDevice(), Outbox()
    link = AnsweringLink([WIDE] * 4, Partition("request", ranks), LateMemory(device, private))
    lane = DeviceLink(link, outbox, device)
    draw = np.random.default_rng(0)
    for step in range(2):
        if step == 1:
            device.counts = dict.fromkeys(device.counts, 0)
        lane.send_plan(plan_of(draw.integers(0, ranks, 64).tolist(), []))
        for layer in range(4):
            rows = torch.randn(64, WIDE.row_columns).split(widths(WIDE), 1)
            lane.send_rows(layer, rows if beside else [x.clone() for x in rows], torch.zeros(64, WIDE.out_columns))
            while not lane.Test():
                pass
            lane.recv_output()
            device.finish()
    return device.counts


def test_a_layer_takes_one_gather_and_one_scatter_and_its_places_go_there_once_a_step():
    few, many = crossing(2), crossing(16)
    assert few["tell"] == many["tell"] == 4 * 2  # a gather and a scatter a layer
    assert few["upload"] == many["upload"] == 1
    assert many["out"] == many["into"] == 4
    assert many["empty"] == 0  # memory of the device is kept from step to step
    assert many["copies"] == 4 * 2 * 16  # memory of each R-rank of its own, as shared memory is
    assert crossing(16, private=True)["copies"] == 4 * 2 * 16


def test_memory_that_follows_each_other_is_copied_at_once():
    class Together(AnsweringLink):
        """Memory of all R-ranks one behind the other, sent as one parcel."""

        def parcels(self, layer, dtype):
            apart = super().parcels(layer, dtype)
            packed = [rows for parcel in apart for rows in parcel.packed]
            sent = self.memory.empty(sum(len(p.sent) for p in packed), dtype).split([len(p.sent) for p in packed])
            back = self.memory.empty(sum(len(p.answered) for p in packed), dtype)
            answers = back.split([len(p.answered) for p in packed])
            each = zip(packed, sent, answers, strict=True)
            return [LocalParcel([PackedRows(p.piece, p.columns, *memory)]) for p, *memory in each]

    device = LateDevice()
    lane = DeviceLink(Together([WIDE], Partition("request", 8), LateMemory(device)), Outbox(), device)
    lane.send_plan(plan_of([0, 1, 2, 3, 4, 5, 6, 7] * 4, []))
    lane.send_rows(0, torch.randn(32, WIDE.row_columns).split(widths(WIDE), 1), torch.zeros(32, WIDE.out_columns))
    while not lane.Test():
        pass
    before = device.counts["copies"]
    lane.recv_output()
    assert (before, device.counts["copies"] - before) == (8, 1)  # there by parcel, back at once


def test_the_first_parcel_is_sent_before_the_last_has_left():
    device, outbox = LateDevice(), Outbox()
    link = AnsweringLink([WIDE], Partition("request", 4), LateMemory(device))
    lane = DeviceLink(link, outbox, device)
    lane.send_plan(plan_of([0, 1, 2, 3] * 4, []))
    device.go_on = lambda: None
    lane.send_rows(0, torch.randn(16, WIDE.row_columns).split(widths(WIDE), 1), torch.zeros(16, WIDE.out_columns))
    for _ in range(device.patience + 1):
        outbox.send_ready()
    assert link.order == ["send"] and len(device.streams["out"]) == 3


@pytest.mark.parametrize("seed", range(4))
def test_rows_that_are_sent_away_are_not_overwritten(seed):
    """By those of the next layer, though nothing comes back to wait for."""
    device, outbox = LateDevice(seed), Outbox()
    link = AnsweringLink([WIDE] * 3, Partition("request", 2), LateMemory(device))
    lane, came = DeviceLink(link, outbox, device), []
    link.send = lambda parcel: came.extend(packed.sent.clone() for packed in parcel.packed)
    lane.send_plan(plan_of([0, 1, 1, 0], []))
    given = [torch.randn(4, WIDE.row_columns) for _ in range(3)]
    for layer, whole in enumerate(given):
        lane.send_away(layer, whole.split(widths(WIDE), 1))
    while outbox.holds(link):
        outbox.send_ready()
    wanted = [whole[rows].flatten() for whole in given for rows in ([0, 3], [1, 2])]
    assert all(torch.equal(one, other) for one, other in zip(came, wanted, strict=True))


def test_who_waits_for_a_device_pokes_all_lanes():
    device, outbox = LateDevice(patience=3), Outbox()
    lanes = [AnsweringLink([WIDE], Partition("request", 1), LateMemory(device)) for _ in range(2)]
    links = [DeviceLink(lane, outbox, device) for lane in lanes]
    device.go_on = lambda: None
    links[0].send_plan(plan_of([0], []))
    links[0].send_rows(0, torch.randn(1, WIDE.row_columns).split(widths(WIDE), 1), torch.zeros(1, WIDE.out_columns))
    assert not links[0].Test()
    assert lanes[0].pokes == lanes[1].pokes >= 1


def test_memory_that_is_not_pinned_is_found():
    device = LateDevice()
    lane = DeviceLink(AnsweringLink([WIDE], Partition("request", 1), PlainMemory()), Outbox(), device)
    lane.send_plan(plan_of([0], []))
    with pytest.raises(AssertionError, match="not pinned"):
        lane.send_rows(0, torch.randn(1, WIDE.row_columns).split(widths(WIDE), 1), torch.zeros(1, WIDE.out_columns))
