"""Emulated nodes: network and UTS namespaces of this machine, joined by a bridge. For MPI they share no memory.

Each node has one of the machine's cores. Needs root and the `ip` command.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest


def _possible() -> bool:
    """Whether this process may make a network of its own."""
    if os.geteuid() != 0 or not all(map(shutil.which, ("ip", "nsenter", "unshare", "taskset"))):
        return False
    script = "ip link add br0 type bridge && ip link add v0 type veth peer name v1"
    return subprocess.run(["unshare", "-n", "-u", "sh", "-c", script], capture_output=True, check=False).returncode == 0


needs_nodes = pytest.mark.skipif(not _possible(), reason="needs root, ip and nsenter, and networks of its own")
_NETWORK = "10.77.0"
# Takes the place of ssh: its last arguments are a host and what to run there.
_AGENT = """#!/bin/bash
while [[ $1 == -* ]]; do shift; done
node=$(( ${{1##*.}} - 1 )); shift
pids=({pids}); cpus=({cpus})
exec taskset -c ${{cpus[$((node % ${{#cpus[@]}}))]}} nsenter -t ${{pids[$node]}} -n -u bash -c "$*"
"""


class Nodes:
    """Context of `count` nodes; the launcher of MPICH starts ranks there."""

    def __init__(self, count: int, folder: Path):
        self.count, self.agent = count, folder / "agent"
        self._holders: list[subprocess.Popen] = []

    def __enter__(self) -> Nodes:
        for node in range(self.count):
            script = f"hostname node{node} && exec sleep 3600"
            self._holders.append(subprocess.Popen(["unshare", "-n", "-u", "sh", "-c", script]))
        end = time.monotonic() + 10
        while any(self._command(node, "hostname").strip() != f"node{node}" for node in range(self.count)):
            assert time.monotonic() < end, "the nodes do not come up"
            time.sleep(0.05)
        self._join()
        pids, cpus = ([str(h.pid) for h in self._holders], map(str, sorted(os.sched_getaffinity(0))))
        self.agent.write_text(_AGENT.format(pids=" ".join(pids), cpus=" ".join(cpus)))
        self.agent.chmod(0o755)
        return self

    def __exit__(self, *_: object) -> None:
        for holder in self._holders:
            holder.kill()
            holder.wait()

    def _join(self) -> None:
        self._command(0, "ip link add br0 type bridge; ip link set br0 up; ip link set lo up")
        self._command(0, f"ip addr add {_NETWORK}.1/24 dev br0")
        for node in range(1, self.count):
            pair = f"ip link add v{node} type veth peer name eth0 netns {self._holders[node].pid}"
            self._command(0, f"{pair}; ip link set v{node} master br0 up")
            self._command(
                node, f"ip addr add {_NETWORK}.{node + 1}/24 dev eth0; ip link set eth0 up; ip link set lo up"
            )

    def _command(self, node: int, script: str) -> str:
        line = ["nsenter", "-t", str(self._holders[node].pid), "-n", "-u", "sh", "-c", script]
        return subprocess.run(line, capture_output=True, text=True, check=False).stdout

    def line(self, *command: object) -> list[str]:
        """Return the command line that starts one rank of `command` on each node."""
        mpiexec = str(Path(sys.executable).parent / "mpiexec")
        hosts = ",".join(f"{_NETWORK}.{node + 1}" for node in range(self.count))
        launcher = ["-launcher", "ssh", "-launcher-exec", str(self.agent), "-hosts", hosts, "-iface", "br0"]
        core = str(min(os.sched_getaffinity(0)))  # the launcher starts the first node's rank itself
        inside = ["taskset", "-c", core, "nsenter", "-t", str(self._holders[0].pid), "-n", "-u", mpiexec]
        return [*inside, *launcher, "-n", str(self.count), "-ppn", "1", *map(str, command)]
