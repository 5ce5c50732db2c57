"""The checks of `hpcdecode doctor`, on worlds that are made up; the command itself runs in tests/cli."""

import msgspec
import pytest

from hpcdecode.doctor import checks
from hpcdecode.doctor.facts import MemoryFacts, RankFacts
from hpcdecode.ranks import launch
from hpcdecode.ranks.roles import Rank
from hpcdecode.system import cgroup


def rank(number, role="R", cpus=(0, 1), host="a", numa="0", isa="avx2", launcher="srun", **rest):
    place = Rank(rank=number, host=host, cpus=list(cpus), role=role, numa=numa, isa=isa if "R" in role else "")
    memory = MemoryFacts(read_gbps={1: 20.0, 2: 40.0}, huge=1.0, local=1.0) if "R" in role else None
    facts = {
        "rank": place,
        "cpus": list(cpus),
        "host_cpus": 4,
        "host_nodes": 2,
        "cpu_quota": None,
        "huge_pages": "madvise",
        "memory": memory,
        "available": 64 << 30,
        "built_isas": ["generic", "avx2", "avx512"],
        "supported_isas": ["generic", "avx2"],
        "untested_isas": [],
        "gpu_attention": "built without CUDA",
        "mpi": "MPICH 5",
        "launcher": launcher,
        "versions": {"torch": "2"},
    }
    return RankFacts(**facts | rest)


def found(*ranks):
    return [p for check in checks.CHECKS for p in check(list(ranks))]


def healthy():
    return [rank(0, "S"), rank(1, cpus=(2, 3)), rank(2, host="b"), rank(3, cpus=(2, 3), host="b", numa="1")]


def test_a_healthy_world_has_no_problems():
    assert found(*healthy()) == []
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(healthy()), type=list[RankFacts]) == healthy()


def slow(f):
    f.memory.read_gbps = {1: 9.0, 2: 12.0}


@pytest.mark.parametrize(
    ("change", "check", "remedy"),
    [
        (lambda f: setattr(f.rank, "numa", "0,1"), "numa", "--ntasks-per-node=2 --cpu-bind=ldoms"),
        (lambda f: setattr(f.rank, "cpus", [1, 2, 3]), "cores", "--cpu-bind=cores"),
        (lambda f: setattr(f, "cpu_quota", 1.5), "quota", "to 4"),
        (lambda f: setattr(f, "huge_pages", "never"), "huge pages", "echo madvise"),
        (lambda f: setattr(f.memory, "huge", 0.5), "huge pages", "compact_memory"),
        (lambda f: setattr(f.memory, "local", 0.5), "local memory", "--mem-bind=local"),
        (lambda f: setattr(f.rank, "isa", "generic"), "ISA", "unset HPCDECODE_ISA"),
        (lambda f: setattr(f.rank, "isa", "avx512"), "ISA", "HPCDECODE_ISA=avx2"),
        (lambda f: setattr(f, "available", 1 << 20), "memory", "--mem=0"),
        (lambda f: setattr(f, "versions", {"torch": "1"}), "versions", "one environment"),
        (lambda f: setattr(f.rank, "gpu_trouble", "the driver is too old"), "GPUs", "update the driver"),
        (slow, "bandwidth", "memory channels"),
    ],
)
def test_what_is_wrong_with_one_rank_is_found_and_has_a_remedy(change, check, remedy):
    ranks = healthy()
    change(ranks[1])
    problems = {p.check: p for p in found(*ranks)}
    assert 1 in problems[check].ranks and remedy in problems[check].remedy
    assert set(problems) == {check}


def test_cores_that_the_job_has_but_does_not_use():
    ranks = [rank(0, "S", cpus=[0]), rank(1, cpus=[1])]
    (problem,) = found(*ranks)
    assert problem.check == "idle cores" and "2 of the job's 4 CPUs" in problem.finding
    for f in ranks:
        f.launcher = ""
    assert found(*ranks) == []


def test_the_remedy_speaks_the_launchers_language():
    for launcher, word in (("mpiexec", "-bind-to numa"), ("mpirun", "--map-by numa"), ("", "one rank per NUMA node")):
        (problem,) = found(rank(0, "SR", cpus=range(4), numa="0,1", launcher=launcher))
        assert word in problem.remedy


def test_cores_of_other_hosts_are_other_cores():
    assert found(*(rank(i, cpus=range(4), host=f"n{i}") for i in range(3))) == []


@pytest.mark.parametrize(
    ("name", "word"), [("SLURM_STEP_NUM_TASKS", "--mpi=pmi2"), ("OMPI_COMM_WORLD_SIZE", "MPI4PY_LIBMPI")]
)
def test_a_world_that_fell_apart(monkeypatch, name, word):
    for names in launch._COUNTS.values():
        for other in names:
            monkeypatch.delenv(other, raising=False)
    monkeypatch.setenv(name, "4")
    (problem,) = found(rank(0, "SR", cpus=range(4)))
    assert problem.check == "world" and word in problem.remedy and "4 processes" in problem.finding


@pytest.fixture
def groups(tmp_path, monkeypatch):
    """A process in group /job/step of an empty tree; returns a function that writes a file of it."""

    def own(*lines):
        (tmp_path / "own").write_text("".join(f"{line}\n" for line in lines))

    def write(path, text):
        file = tmp_path / "root" / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)

    monkeypatch.setattr(cgroup, "_OWN", str(tmp_path / "own"))
    monkeypatch.setattr(cgroup, "_ROOT", str(tmp_path / "root"))
    return own, write


def test_limits_of_control_groups_version_2(groups):
    own, write = groups
    own("0::/job/step")
    assert (cgroup.memory_headroom(), cgroup.cpu_quota(), cgroup.cpus()) == (None, None, [])
    write("job/step/memory.max", "max\n")
    write("job/memory.max", f"{8 << 30}\n")
    write("job/memory.current", f"{3 << 30}\n")
    write("job/memory.stat", f"anon 5\nactive_file {1 << 30}\ninactive_file 0\n")
    write("job/step/cpu.max", "150000 100000\n")
    write("job/cpu.max", "max 100000\n")
    write("job/cpuset.cpus.effective", "0-2,6\n")
    assert (cgroup.memory_headroom(), cgroup.cpu_quota(), cgroup.cpus()) == (6 << 30, 1.5, [0, 1, 2, 6])


def test_limits_of_control_groups_version_1(groups):
    own, write = groups
    own("5:cpuacct,cpu:/job", "4:memory:/job/step", "3:cpuset:/", "0::/")
    write("memory/memory.limit_in_bytes", f"{(1 << 63) - 4096}\n")
    write("memory/job/memory.limit_in_bytes", "5000000\n")
    write("memory/job/memory.usage_in_bytes", "3000000\n")
    write("memory/job/memory.stat", "total_active_file 100\ntotal_inactive_file 20\n")
    write("cpu/job/cpu.cfs_quota_us", "50000\n")
    write("cpu/job/cpu.cfs_period_us", "100000\n")
    write("cpu/cpu.cfs_quota_us", "-1\n")
    write("cpu/cpu.cfs_period_us", "100000\n")
    assert (cgroup.memory_headroom(), cgroup.cpu_quota(), cgroup.cpus()) == (2000120, 0.5, [])
