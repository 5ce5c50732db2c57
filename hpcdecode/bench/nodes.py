"""Emulated nodes: network and UTS namespaces of this machine, joined by a bridge. For MPI they share no memory.

Each node has one of this process's cores, alone where there are enough. Needs root and the `ip` command.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from hpcdecode.errors import UserError

_PROGRAMS = ("ip", "nsenter", "unshare", "taskset")
_NETWORK = "10.77.0"
_UP_SECONDS = 10.0
# Takes the place of ssh: its last arguments are a host and what to run there.
_AGENT = """#!/bin/bash
while [[ $1 == -* ]]; do shift; done
node=$(( ${{1##*.}} - 1 )); shift
pids=({pids}); cpus=({cpus})
exec taskset -c ${{cpus[$((node % ${{#cpus[@]}}))]}} nsenter -t ${{pids[$node]}} -n -u bash -c "$*"
"""


def obstacle() -> str | None:
    """Return why this process cannot make emulated nodes, or None if it can."""
    if os.geteuid() != 0:
        return "not root"
    if missing := [name for name in _PROGRAMS if not shutil.which(name)]:
        return f"no {' and no '.join(missing)}"
    script = "ip link add br0 type bridge && ip link add v0 type veth peer name v1"
    tried = subprocess.run(["unshare", "-n", "-u", "sh", "-c", script], capture_output=True, text=True, check=False)
    return " ".join(tried.stderr.split()) or "no networks of its own" if tried.returncode else None


class Nodes:
    """Context of emulated nodes; they end with it, or with this process.

    Args:
        count: Number of nodes.

    Raises:
        UserError: This process cannot make them.
    """

    def __init__(self, count: int):
        if problem := obstacle():
            raise UserError(
                f"emulated nodes: expected root with {', '.join(_PROGRAMS)} and the right to make networks, got "
                f"{problem}; start the command as root, or over real nodes with mpiexec or srun"
            )
        self.count, self.cpus = count, sorted(os.sched_getaffinity(0))
        self._holders: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> Nodes:
        self._folder = tempfile.TemporaryDirectory(prefix="nodes")
        self._agent = Path(self._folder.name) / "agent"
        try:
            self._start()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for holder in self._holders:
            holder.kill()
            holder.communicate()
        self._folder.cleanup()

    def line(self, *command: object, first: int = 1) -> list[str]:
        """Return the command line that starts ranks of `command`, by the MPI library's own launcher.

        Args:
            command: Program and arguments.
            first: Number of ranks on the first node; each other node has one.
        """
        mpiexec = Path(sys.executable).parent / "mpiexec"
        launcher = str(mpiexec) if mpiexec.exists() else shutil.which("mpiexec")
        if launcher is None:
            raise UserError(
                "emulated nodes: expected an mpiexec beside Python or in PATH, got none; install hpcdecode[mpi]"
            )
        hosts = ",".join(f"{_address(node)}:{1 if node else first}" for node in range(self.count))
        flags = self._open_mpi(hosts) if _is_open_mpi(launcher) else self._hydra(hosts)
        flags += ["-n", str(self.count - 1 + first)]
        # The launcher itself starts the first node's rank.
        return ["taskset", "-c", str(self.cpus[0]), *self._inside(0), launcher, *flags, *map(str, command)]

    def _hydra(self, hosts: str) -> list[str]:
        return ["-launcher", "ssh", "-launcher-exec", str(self._agent), "-hosts", hosts, "-iface", "br0"]

    def _open_mpi(self, hosts: str) -> list[str]:
        network = f"{_NETWORK}.0/24"
        flags = ["--prtemca", "plm", "ssh", "--prtemca", "plm_ssh_agent", str(self._agent)]
        flags += ["--prtemca", "prte_if_include", network, "--mca", "btl_tcp_if_include", network]
        flags += ["--mca", "osc", "^ucx", "--allow-run-as-root", "--bind-to", "none"]
        return [*flags, "--host", hosts]

    def _start(self) -> None:
        for node in range(self.count):
            script = f"hostname node{node} && exec cat"  # which ends once its input does
            line = ["unshare", "-n", "-u", "sh", "-c", script]
            self._holders.append(subprocess.Popen(line, stdin=subprocess.PIPE))
        end = time.monotonic() + _UP_SECONDS
        while any(self._run(node, "hostname").strip() != f"node{node}" for node in range(self.count)):
            if time.monotonic() > end:
                raise UserError(f"emulated nodes: expected {self.count} within {_UP_SECONDS:g} s, got fewer; try again")
            time.sleep(0.05)
        self._run(0, f"ip link add br0 type bridge; ip addr add {_address(0)}/24 dev br0; {_up('br0')}; {_up('lo')}")
        for node in range(1, self.count):
            pair = f"ip link add v{node} type veth peer name eth0 netns {self._holders[node].pid}"
            self._run(0, f"{pair}; ip link set v{node} master br0; {_up(f'v{node}')}")
            self._run(node, f"ip addr add {_address(node)}/24 dev eth0; {_up('eth0')}; {_up('lo')}")
        pids, cpus = [str(holder.pid) for holder in self._holders], map(str, self.cpus)
        self._agent.write_text(_AGENT.format(pids=" ".join(pids), cpus=" ".join(cpus)))
        self._agent.chmod(0o755)

    def _inside(self, node: int) -> list[str]:
        return ["nsenter", "-t", str(self._holders[node].pid), "-n", "-u"]

    def _run(self, node: int, script: str) -> str:
        line = [*self._inside(node), "sh", "-c", script]
        return subprocess.run(line, capture_output=True, text=True, check=False).stdout


def _address(node: int) -> str:
    return f"{_NETWORK}.{node + 1}"


def _up(device: str) -> str:
    return f"ip link set {device} up"


def _is_open_mpi(launcher: str) -> bool:
    version = subprocess.run([launcher, "--version"], capture_output=True, text=True, check=False)
    return "Open MPI" in version.stdout
