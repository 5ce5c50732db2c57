"""`hpcdecode` in a process that something happens to.

usage: launcher.py killed ROWS ARGUMENT...    commits every 5 finished rows, and is killed after so many
       launcher.py clock ARGUMENT...          the clock goes back by an hour whenever it is asked
"""

from __future__ import annotations

import os
import signal
import sys
import time
from itertools import count

from hpcdecode.cli import main
from hpcdecode.data.results.writer import ResultsWriter

COMMIT_ROWS = 5


def killed(rows: int) -> None:
    add, numbers = ResultsWriter.add, count(1)

    def added(self: ResultsWriter, *samples) -> None:
        add(self, *samples)
        number = next(numbers)
        if number % COMMIT_ROWS == 0:
            self.checkpoint()
        if number == rows:
            os.kill(os.getpid(), signal.SIGKILL)

    ResultsWriter.add = added


def clock() -> None:
    start, hours = time.time(), count()
    time.time = lambda: start - 3600 * next(hours)


if __name__ == "__main__":
    happens, *arguments = sys.argv[1:]
    if happens == "killed":
        killed(int(arguments.pop(0)))
    else:
        clock()
    sys.exit(main(arguments))
