"""Run by mpiexec: rank 0 waits for a device, which is done once rank 1 has the rows that were sent before.

usage: run_progress.py FILE

FILE: is there once rank 1 has them.
"""

from __future__ import annotations

import sys
from pathlib import Path
from time import monotonic

import numpy as np
import torch
from mpi4py import MPI

from hpcdecode.attention.shapes import LayerShape
from hpcdecode.exchange.memory import LaneSpec
from hpcdecode.exchange.mpi import MpiRLink, MpiSLink
from hpcdecode.exchange.partition import Partition
from hpcdecode.exchange.staging import DeviceLink, Outbox
from hpcdecode.mpi.wait import wait
from hpcdecode.schedule.plan import Plan
from tests.support.late_device import LateDevice, LateMemory

WORLD, SLOTS, SECONDS = MPI.COMM_WORLD, 256, 30
SHAPE = LayerShape(8, 64, 64, 8, 1.0)
PLAN = Plan(decode=np.array([(0, i) for i in range(SLOTS)], np.int32))


class Flag:
    """A mark that is done once a file is there."""

    def __init__(self, path: Path):
        self.path, self.computed = path, None

    def Test(self) -> bool:
        return self.path.exists()


def main(path: Path) -> None:
    device = LateDevice(patience=0)
    specs = [LaneSpec([SHAPE], SLOTS, torch.float32, Partition("request", 1), memory=LateMemory(device))] * 2
    if WORLD.rank:
        links = [MpiRLink(WORLD.Dup(), spec) for spec in specs]
        for link in links:
            wait(link.recv_plan())
            link.take_plan()
            for request, _ in link.recv_rows(0):
                wait(request)
            path.touch()
    else:
        outbox = Outbox()
        lanes = [DeviceLink(MpiSLink(WORLD.Dup(), spec), outbox, device) for spec in specs]
        rows = torch.randn(SLOTS, SHAPE.row_columns).split([512, 512, 512], 1)
        for lane in lanes:
            lane.send_plan(PLAN)
        lanes[0].send_away(0, rows)
        while outbox.holds(lanes[0].link):
            outbox.send_ready()
        device.out_parts = lambda parts, _: [Flag(path)] * len(parts)
        lanes[1].send_away(0, rows)
        end = monotonic() + SECONDS
        while outbox.holds(lanes[1].link):
            outbox.send_ready()
            assert monotonic() < end, "the first lane's rows do not go on while the second waits"
        wait(lanes[1].link._sent)
        print("PROGRESS ok", flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
