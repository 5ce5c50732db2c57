"""The copies of a GPU and its clock, as they are, over streams and events that are emulated and late."""

from __future__ import annotations

import pytest
import torch

from hpcdecode.exchange.device import CudaCopies
from tests.support.lazy_streams import LazyDevice, LazyStream

DEVICE = torch.device("cpu")  # of the tensors; streams and events are emulated


def rounds(device: LazyDevice, count: int = 6) -> list[bool]:
    """Whether values that go to the host and back are those that were computed, round by round."""
    found = []
    with device:
        copies = CudaCopies(DEVICE)
        host, there, back, out = copies.pinned(4, 3, torch.float32), *(torch.zeros(4, 3) for _ in range(3))
        for i in range(count):
            value = torch.full((4, 3), float(i + 1))
            there.copy_(value)  # computed, late
            mark = copies.out([(host, there)])
            while not mark.Test():
                assert device.advance(), "nothing is left to do, and the mark is not done"
            found.append(bool((host == value).all()))
            copies.into([(back, host)], mark)
            out.copy_(back)  # computed behind it
            while device.advance():
                pass
            found.append(bool((out == value).all()))
    return found


@pytest.mark.parametrize("seed", range(8))
def test_copies_come_behind_what_is_computed_and_before_what_needs_them(monkeypatch, seed):
    assert all(rounds(LazyDevice(monkeypatch, seed)))


def test_without_waits_between_streams_values_would_be_wrong(monkeypatch):
    """What the test above could not see otherwise: an order that waits do not settle."""
    monkeypatch.setattr(LazyStream, "wait_event", lambda *_: None)
    assert not all(all(rounds(LazyDevice(monkeypatch, seed))) for seed in range(8))
