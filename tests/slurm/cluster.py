"""A Slurm cluster on this host: its own munged, one slurmctld and several slurmd, all in one folder."""

from __future__ import annotations

import getpass
import os
import secrets
import shutil
import socket
import subprocess
import time
from pathlib import Path

from tests.support.commands import run

PROGRAMS = ("munged", "slurmctld", "slurmd", "srun", "sbatch", "scancel", "scontrol", "squeue", "sinfo")
STARTS = 30  # seconds for the nodes to report
_CONF = """
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={port}
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket,cred_expire=5
CredType=cred/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerType=sched/backfill
SchedulerParameters=bf_interval=1,sched_min_interval=100000,sched_interval=1,batch_sched_delay=0,requeue_delay=1
ReturnToService=2
SlurmdParameters=config_overrides
KillWait=5
{nodes}
PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


def missing() -> list[str]:
    """Programs of Slurm that are not installed."""
    return [name for name in PROGRAMS if shutil.which(name, path=_path()) is None]


def _path() -> str:
    return f"{os.environ['PATH']}:/usr/sbin:/sbin"


class Cluster:
    """As a context: `nodes` nodes of `cpus` CPUs each. environment: for Slurm's commands."""

    def __init__(self, folder: Path, nodes: int = 4, cpus: int = 2):
        self.folder, self.nodes, self.cpus = folder, nodes, cpus
        self.environment = {**os.environ, "PATH": _path(), "SLURM_CONF": str(folder / "slurm.conf")}
        self._daemons: list[subprocess.Popen] = []

    def __enter__(self) -> Cluster:
        try:
            self._configure()
            key, munge = self.folder / "munge.key", self.folder / "munge"
            files = (f"--{kind}-file={munge}.{kind}" for kind in ("pid", "log", "seed"))
            self._start("munged", "-F", "--force", f"--key-file={key}", f"--socket={munge}.socket", *files)
            self._start("slurmctld", "-D", "-i")
            for name in self._names():
                self._start("slurmd", "-D", "-N", name)
            self._wait_for_nodes()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        subprocess.run(["scancel", "--user", getpass.getuser()], env=self.environment, timeout=30, capture_output=True)
        end = time.monotonic() + 20
        while time.monotonic() < end and self("squeue", "-h").stdout.strip():
            time.sleep(0.2)
        for daemon in reversed(self._daemons):
            daemon.terminate()
        for daemon in self._daemons:
            try:
                daemon.wait(10)
            except subprocess.TimeoutExpired:
                daemon.kill()

    def __call__(self, *line: object, timeout: float = 120, **options) -> subprocess.CompletedProcess:
        """Run one of Slurm's commands to its end."""
        return run([*map(str, line)], timeout=timeout, **{"env": self.environment, **options})

    def state(self, job: str) -> str:
        """Such as RUNNING or COMPLETED."""
        return next((word.partition("=")[2] for word in self.shown(job).split() if word.startswith("JobState=")), "")

    def shown(self, job: str) -> str:
        """All that Slurm says of it, in one line."""
        return self("scontrol", "show", "job", job, "-o").stdout

    def wait(self, job: str, *states: str, seconds: float = 120) -> str:
        """The first of `states` that the job comes to; AssertionError if it comes to none in time."""
        end, state = time.monotonic() + seconds, ""
        while time.monotonic() < end:
            state = self.state(job)
            if state in states:
                return state
            assert state not in ("FAILED", "CANCELLED", "NODE_FAIL", "BOOT_FAIL"), self.shown(job)
            time.sleep(0.2)
        raise AssertionError(f"job {job} is {state} after {seconds} s, not {' or '.join(states)}")

    def _names(self) -> list[str]:
        return [f"n{i + 1}" for i in range(self.nodes)]

    def _configure(self) -> None:
        ports = _free_ports(self.nodes + 1)
        places = zip(self._names(), ports[1:], strict=True)
        lines = [
            f"NodeName={name} NodeHostname={name} NodeAddr=127.0.0.1 Port={port} CPUs={self.cpus} RealMemory=2000"
            for name, port in places
        ]
        names = {"host": socket.gethostname().split(".")[0], "user": getpass.getuser(), "folder": self.folder}
        self.folder.chmod(0o755)
        (self.folder / "slurm.conf").write_text(_CONF.format(port=ports[0], nodes="\n".join(lines), **names))
        (self.folder / "cgroup.conf").write_text("CgroupAutomount=no\n")
        key = os.open(self.folder / "munge.key", os.O_WRONLY | os.O_CREAT, 0o600)
        os.write(key, secrets.token_bytes(1024))
        os.close(key)
        for name in ("state", *(f"spool-{name}" for name in self._names())):
            (self.folder / name).mkdir()

    def _start(self, *line: str) -> None:
        with open(self.folder / f"{'-'.join(line[:1] + line[3:4])}.log".replace("/", "_")[-60:], "w") as log:
            self._daemons.append(subprocess.Popen(line, env=self.environment, stdout=log, stderr=log))

    def _wait_for_nodes(self) -> None:
        end = time.monotonic() + STARTS
        while time.monotonic() < end:
            if len(self("sinfo", "-h", "-N", "-t", "idle", "-o", "%N").stdout.split()) == self.nodes:
                return
            time.sleep(0.2)
        logs = "\n".join(path.read_text()[-1000:] for path in self.folder.glob("*.log"))
        raise AssertionError(f"no {self.nodes} idle nodes after {STARTS} s:\n{logs}")


def _free_ports(count: int) -> list[int]:
    sockets = [socket.socket() for _ in range(count)]
    try:
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in sockets]
    finally:
        for one in sockets:
            one.close()
