"""`hpcdecode`, with the tokens that it generates counted in a file, which outlives a kill.

usage: python -m tests.support.counted FOLDER ARGUMENT...     (each S-rank writes FOLDER/PROCESS)
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from hpcdecode.cli import main
from hpcdecode.engine.inputs import Inputs
from hpcdecode.engine.s_rank import SRank
from hpcdecode.schedule.scheduler import Scheduler
from hpcdecode.schedule.step import Step


def count_into(folder: Path) -> None:
    finish_step = SRank._finish_step

    def counted(self: SRank, scheduler: Scheduler, step: Step, inputs: Inputs, tokens: list[int]) -> None:
        descriptor = os.open(folder / str(os.getpid()), os.O_WRONLY | os.O_CREAT)
        os.pwrite(descriptor, b"%12d" % (self.tokens + len(tokens)), 0)
        os.close(descriptor)
        finish_step(self, scheduler, step, inputs, tokens)  # which may make them durable

    SRank._finish_step = counted


if __name__ == "__main__":
    count_into(Path(sys.argv[1]))
    sys.exit(main(sys.argv[2:]))
