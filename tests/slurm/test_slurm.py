"""The scripts of `slurm/` on a real Slurm: every row exactly once, with the tokens of an uninterrupted local run."""

from __future__ import annotations

import json
import os
import shutil
import sys
import time
from itertools import pairwise
from pathlib import Path

import h5py
import pytest

from hpcdecode.system.signals import DRAINED
from tests.slurm.cluster import Cluster, missing
from tests.support.commands import ROOT, Command

pytestmark = pytest.mark.skipif(missing(), reason=f"Slurm is not installed: run tests/slurm/install.sh ({missing()})")
FEW, MANY = 24, 250  # rows
READY = "ready after"  # in the log of a job whose work begins
FLAGS = ("--model", "demo", "--ignore-eos", "--dtype", "float32", "--batch", 32, "--kv-memory", "128M")
FLAGS = (*FLAGS, "--checkpoint-every", 0.5)
THREE = ("--nodes=3", "--ntasks-per-node=1")


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    with Cluster(tmp_path_factory.mktemp("slurm")) as cluster:
        bin = Path(sys.executable).parent
        cluster.environment |= {"PYTHONPATH": str(ROOT), "PATH": f"{bin}:{cluster.environment['PATH']}"}
        yield cluster


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("jobs")
    with open(folder / "prompts.jsonl", "w") as file:
        for i in range(MANY):
            file.write(json.dumps({"prompt": f"The number {i} is", "max_tokens": 30 + i * 37 % 100}) + "\n")
    return folder


@pytest.fixture(scope="module")
def expected(folder, forkserver):
    """Token ids by line of an uninterrupted run in one process."""
    result = Command(folder, forkserver)("generate", "prompts.jsonl", *FLAGS, "-o", "expected.h5")
    assert result.returncode == 0, result.stderr
    return rows(folder / "expected.h5")


def rows(path):
    with h5py.File(path) as file:
        lines, ends, tokens = file["rows/line"][:].tolist(), file["rows/token_offsets"][:], file["rows/token_ids"][:]
        assert file.attrs["complete"] and len(file["errors/line"]) == 0
        assert lines == sorted(set(lines))
        return {line: tokens[a:b].tolist() for line, (a, b) in zip(lines, pairwise(ends), strict=True)}


def first(expected, count):
    return {line: tokens for line, tokens in expected.items() if line <= count}


def submit(cluster, folder, *line):
    result = cluster("sbatch", "--parsable", *line, cwd=folder)
    assert result.returncode == 0, result.stderr
    return result.stdout.strip()


def wait_for_rows(cluster, job, path, more_than=-1, seconds=120):
    """Until the running job has committed more rows than so many; returns how many it has."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        cluster.wait(job, "PENDING", "RUNNING", "COMPLETING")
        if path.exists():
            with h5py.File(path) as file:
                assert not file.attrs["complete"]
                count = len(file["rows/line"])
            if count > more_than:
                return count
        time.sleep(0.2)
    pytest.fail(f"job {job}: no row was finished in {seconds} s: {logs(path.parent)}")


def wait_for_start(cluster, job, folder, starts, seconds=120):
    """Until the jobs of this folder have begun to work more often than so: signals are obeyed from then on."""
    end = time.monotonic() + seconds
    while logs(folder).count(READY) <= starts:
        assert time.monotonic() < end, f"job {job} did not start again: {logs(folder)}"
        cluster.wait(job, "PENDING", "RUNNING", "COMPLETING")
        time.sleep(0.2)


def logs(folder):
    return "\n".join(path.read_text() for path in folder.glob("*.log"))


def test_srun_makes_one_world_of_its_tasks(cluster, folder, expected):
    arguments = ("generate", "prompts.jsonl", *FLAGS, "--limit", FEW, "-o", "srun.h5")
    result = cluster("srun", "-K", "--mpi=pmi2", "-n", 3, "hpcdecode", *arguments, cwd=folder)
    assert result.returncode == 0, result.stderr
    assert rows(folder / "srun.h5") == first(expected, FEW)
    with h5py.File(folder / "srun.h5") as file:
        assert [rank["role"] for rank in json.loads(file.attrs["topology"])] == ["SR"] * 3


# A heap of text with holes in it, as after the import of many modules.
TEXT_ON_THE_HEAP = """
import random
texts = [bytes(random.choices(range(33, 127), k=size)) for size in (200, 300, 600, 900, 3000) for _ in range(800)]
kept = texts[::2]
del texts
"""
START = "from hpcdecode.ranks.launch import connect; print(connect().allreduce(1))"
MANY_DEVICES = """
mount -t sysfs sysfs /sys && ip link set lo up
for i in $(seq 10); do
    ip link add a$i type veth peer name b$i && ip addr add 10.77.$i.1/30 dev a$i && ip addr add 10.77.$i.2/30 dev b$i
    ip link set a$i up && ip link set b$i up
done
exec "$@"
"""
STALE_MEMORY = """#!{python}
import glob, os
from hpcdecode.mpi.mpich import segment_names
for name in segment_names(os.environ["SLURM_JOB_ID"] + ".0"):
    for node in range(3):
        with open(f"/dev/shm/{{name}}{{node}}", "wb") as file:
            file.write(b"\\1" * (8 << 20))
        os.utime(file.name, (1, 1))
status = os.system("srun -K --mpi=pmi2 {python} -c '{start}'")
left = [path for name in segment_names(os.environ["SLURM_JOB_ID"] + ".0") for path in glob.glob(f"/dev/shm/{{name}}*")]
list(map(os.unlink, left))
print("status", status, "left", len(left), flush=True)
"""


def test_ranks_meet_whatever_lies_on_their_heaps(cluster, folder):
    """MPICH would publish it in lines that Slurm cuts, and the ranks would wait for ever."""
    program = (sys.executable, "-c", TEXT_ON_THE_HEAP + START)
    result = cluster("srun", "-K", "--mpi=pmi2", "-n", 3, *program, cwd=folder, timeout=60)
    assert result.returncode == 0 and result.stdout.split() == ["3"] * 3, result.stderr


@pytest.mark.skipif(os.geteuid() != 0 or shutil.which("ip") is None, reason="needs root, and ip to make devices")
def test_ranks_meet_on_nodes_with_many_network_devices(cluster, folder):
    program = ("unshare", "-n", "-m", "sh", "-c", MANY_DEVICES, "sh", sys.executable, "-c", START)
    result = cluster("srun", "-K", "--mpi=pmi2", "-n", 3, *program, cwd=folder, timeout=60)
    assert result.returncode == 0 and result.stdout.split() == ["3"] * 3, result.stderr


def test_a_requeued_job_does_not_take_the_shared_memory_of_its_killed_run(cluster, folder):
    script = folder / "stale.py"
    script.write_text(STALE_MEMORY.format(python=sys.executable, start=START))
    job = submit(cluster, folder, "--nodes=2", "--ntasks=3", "--output=stale.txt", script)
    cluster.wait(job, "COMPLETED")
    assert (folder / "stale.txt").read_text().split("\n")[-5:] == ["3", "3", "3", "status 0 left 0", ""]


def test_a_step_without_pmi_is_named_and_writes_nothing(cluster, folder):
    arguments = ("generate", "prompts.jsonl", *FLAGS, "-o", "apart.h5")
    result = cluster("srun", "-K", "--mpi=none", "-n", 3, "hpcdecode", *arguments, cwd=folder)
    assert result.returncode == 2 and result.stderr.count("srun --mpi=pmi2 with MPICH") == 1, result.stderr
    assert not (folder / "apart.h5").exists()


def test_s_and_r_on_different_nodes(cluster, folder, expected):
    script = ROOT / "slurm" / "hetero.sbatch"
    job = submit(cluster, folder, script, "prompts.jsonl", *FLAGS, "--limit", FEW, "-o", "hetero.h5")
    cluster.wait(job, "COMPLETED")
    assert rows(folder / "hetero.h5") == first(expected, FEW)
    with h5py.File(folder / "hetero.h5") as file:
        assert [rank["role"] for rank in json.loads(file.attrs["topology"])] == ["S", "R", "R", "R"]


def test_an_array_of_shards_is_merged(cluster, folder, expected):
    cluster.environment["SHARDS"] = "3"
    arguments = ("prompts.jsonl", *FLAGS, "--limit", FEW)
    array = submit(cluster, folder, "--array=0-2", ROOT / "slurm" / "array.sbatch", *arguments)
    merge = "hpcdecode merge array.h5 prompts.*-of-3.h5"
    job = submit(cluster, folder, f"--dependency=afterok:{array}", "--wrap", merge)
    cluster.wait(job, "COMPLETED", seconds=180)
    assert rows(folder / "array.h5") == first(expected, FEW)


def test_a_job_goes_on_after_a_signal_and_a_requeue(cluster, folder, expected):
    """A drain, after which the script requeues itself, and a requeue from outside."""
    script, out = ROOT / "slurm" / "cpu.sbatch", folder / "requeued.h5"
    long = ("--batch", 6)  # many steps, lest it ends before the last signal
    job = submit(cluster, folder, *THREE, script, "prompts.jsonl", *FLAGS, *long, "-o", out)
    done = wait_for_rows(cluster, job, out)
    for how in (("scancel", "--signal=USR1"), ("scontrol", "requeue")):
        starts = logs(folder).count(READY)
        told = time.monotonic()
        while (asked := cluster(*how, job)).returncode != 0:  # a busy controller may not know yet that it runs
            assert time.monotonic() < told + 20, asked.stderr
            time.sleep(0.2)
        cluster.wait(job, "PENDING", seconds=20)
        wait_for_start(cluster, job, folder, starts)
        done = wait_for_rows(cluster, job, out, more_than=done)
    cluster.wait(job, "COMPLETED", seconds=180)
    assert rows(out) == expected
    assert logs(folder).count("stopped by SIGUSR1") == 1
    assert f"Exited with exit code {DRAINED}" in logs(folder)


@pytest.mark.full
def test_a_job_that_needs_three_walltimes(cluster, folder):
    """Of 60 s each: Slurm's warning drains the job, and the script requeues it."""
    arguments = ("prompts.jsonl", *FLAGS, "--n", 12, "--temperature", 1, "--batch", 96)
    whole = Command(folder)("generate", *arguments, "-o", "whole.h5", timeout=600)
    assert whole.returncode == 0, whole.stderr
    limits = ("--time=1", "--signal=USR1@15", *THREE)
    job = submit(cluster, folder, *limits, ROOT / "slurm" / "cpu.sbatch", *arguments, "-o", "walltimes.h5")
    cluster.wait(job, "COMPLETED", seconds=900)
    assert logs(folder).count("stopped by") >= 2
    with h5py.File(folder / "whole.h5") as whole, h5py.File(folder / "walltimes.h5") as made:
        for name in ("line", "sample", "token_offsets", "token_ids"):
            assert (whole["rows"][name][:] == made["rows"][name][:]).all()
