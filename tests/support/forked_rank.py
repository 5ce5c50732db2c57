"""A rank under mpiexec that lets the fork server have the process: it starts in milliseconds, without imports.

The process that the server forks has this one's arguments, environment, directory, CPUs, network and streams, and its
connection to the launcher. It gets the signals that this one gets, and ends when this one does, and the other way
round. This one bears its number as its name: who ends a rank by its process ends that one.

usage: python -S -E forked_rank.py SOCKET MODULE ARGUMENT...
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
from contextlib import suppress

OF_LAUNCHER = "PMI_FD"  # names the descriptor over which MPICH talks to its launcher
NAME = "for "  # begins a name in Linux, of at most 15 characters; a process id follows
OF_NODE = ("net", "uts")  # namespaces that an emulated node has of its own
PASSED_ON = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2, signal.SIGCONT)


def main(address: str, module: str, arguments: list[str]) -> int:
    variables = dict(os.environ)
    spaces = [os.open(f"/proc/self/ns/{kind}", os.O_RDONLY) for kind in OF_NODE]
    descriptors = [0, 1, 2, *spaces, *([int(variables[OF_LAUNCHER])] if OF_LAUNCHER in variables else [])]
    request = {
        "module": module,
        "arguments": arguments,
        "directory": os.getcwd(),
        "environment": variables,
        "cpus": sorted(os.sched_getaffinity(0)),
    }
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(address)
        socket.send_fds(connection, [b"."], descriptors)
        with connection.makefile("rw") as channel:
            channel.write(json.dumps(request) + "\n")
            channel.flush()
            stand_in_for(int(channel.readline()))
            code = int(channel.readline())
    if code < 0:
        signal.signal(-code, signal.SIG_DFL) if -code != signal.SIGKILL else None
        os.kill(os.getpid(), -code)
    return code


def stand_in_for(process: int) -> None:
    """Pass on signals to a process, and say so in this one's name."""

    def pass_on(number: int, _) -> None:
        with suppress(ProcessLookupError):
            os.kill(process, number)

    for number in PASSED_ON:
        signal.signal(number, pass_on)
    with open("/proc/self/comm", "w") as name:
        name.write(f"{NAME}{process}")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2], sys.argv[3:]))
