"""Pretended NUMA nodes: who holds what changes, nothing else does. tests/native/numa_test.cpp looks at real pages."""

import os
import subprocess
import sys

import pytest
import torch

from hpcdecode.attention.base import KvCapacityError
from hpcdecode.attention.open import open_kv_cache
from hpcdecode.attention.shapes import LayerShape
from hpcdecode.ranks import roles
from hpcdecode.system import cores
from tests.support.attention_cases import ints, make_batch, pretend, run_batch

SHAPE = LayerShape(2, 8, 8, 4, 0.4)
CPUS = sorted(os.sched_getaffinity(0))


def open_on(*nodes, blocks=8):
    options = {"kv_dtype": "bfloat16", "capacity_tokens": 16 * blocks, "max_sequences": 8, "block_tokens": 16}
    return open_kv_cache([SHAPE], **options, **pretend(*nodes))


@pytest.mark.parametrize("kv_dtype", ["float32", "int8"])
@pytest.mark.parametrize("nodes", [(0, 1), (5, 2, 5, 2), (0, 1, 2), (0, 0, 0, 1)])
def test_output_is_the_same_on_any_nodes(nodes, kv_dtype):
    shape = LayerShape(4, 64, 64, 12, 0.125)
    batch = make_batch(shape, (1, 30, 64, 2000, 513, 1400, 77), (1, 2, 1, 70, 1, 3, 1))
    assert torch.equal(run_batch(batch, kv_dtype), run_batch(batch, kv_dtype, **pretend(*nodes)))


def test_blocks_are_shared_out_by_threads():
    assert open_on(0, 1, blocks=8).node_free_blocks == [4, 4]
    assert open_on(1, 0, 1, blocks=9).node_free_blocks == [3, 6]
    assert open_on(0, 1, 2, blocks=2).node_free_blocks == [0, 1, 1]
    assert open_on(3, blocks=5).node_free_blocks == [5]


def test_a_sequence_keeps_to_the_node_that_had_most_room():
    store = open_on(0, 1)
    store.extend(ints([0, 1]), ints([17, 16]))
    assert store.node_free_blocks == [2, 3]
    store.extend(ints([2, 0]), ints([1, 30]))
    assert store.node_free_blocks == [1, 2]
    store.release(ints([0]))
    assert store.node_free_blocks == [4, 2]


def test_forks_and_their_copied_tails_stay_on_the_node_of_their_parent():
    store = open_on(0, 1)
    store.extend(ints([0, 1]), ints([20, 4]))
    store.append(0, ints([0]), ints([20]), torch.randn(20, SHAPE.kv_columns))
    store.fork(0, 2)
    store.extend(ints([0, 2]), ints([1, 1]))
    assert store.node_free_blocks == [1, 3]
    store.check()


def test_a_full_node_spills_so_that_the_whole_capacity_can_be_used():
    store = open_on(0, 1, 1)
    rows = torch.randn(128, SHAPE.kv_columns)
    store.extend(ints([0]), ints([128]))
    store.append(0, ints([0]), ints([128]), rows)
    assert store.free_blocks == 0
    with pytest.raises(KvCapacityError):
        store.extend(ints([0]), ints([1]))
    store.check()
    store.truncate(0, 127)
    store.extend(ints([0]), ints([1]))
    qkv = torch.cat([torch.randn(1, SHAPE.q_columns), rows[127:]], dim=1)
    out, alone = torch.zeros(1, SHAPE.out_columns), torch.zeros(1, SHAPE.out_columns)
    store.attend(0, ints([0]), ints([1]), qkv, out)
    other = open_on(0)
    other.extend(ints([0]), ints([127]))
    other.append(0, ints([0]), ints([127]), rows[:127])
    other.extend(ints([0]), ints([1]))
    other.attend(0, ints([0]), ints([1]), qkv, alone)
    assert torch.equal(out, alone)
    store.release(ints([0]))
    assert store.node_free_blocks == [2, 6]


@pytest.mark.parametrize(
    "options, message",
    [
        ({"nodes": [0]}, "one NUMA node per thread and CPU"),
        ({"nodes": [0, -1]}, "negative"),
        ({"nodes": [0, 1], "cpus": []}, "one NUMA node per thread and CPU"),
    ],
)
def test_bad_nodes(options, message):
    settings = {"kv_dtype": "float32", "capacity_tokens": 64, "max_sequences": 4} | pretend(0, 0) | options
    with pytest.raises(ValueError, match=message):
        open_kv_cache([SHAPE], **settings)


@pytest.fixture
def machine(tmp_path, monkeypatch):
    """Two nodes of two cores of two threads: even CPUs on node 0, and CPU c + 4 on the core of CPU c."""
    for cpu in range(8):
        folder = tmp_path / f"cpu{cpu}"
        (folder / "topology").mkdir(parents=True)
        (folder / f"node{cpu % 2}").mkdir()
        (folder / "topology" / "thread_siblings_list").write_text(f"{cpu % 4},{cpu % 4 + 4}\n")
    monkeypatch.setattr(cores, "_CPU", str(tmp_path / "cpu{}"))


def test_cores_are_arranged_by_node_and_core(machine):
    assert cores.arranged(range(8)) == [0, 4, 2, 6, 1, 5, 3, 7]
    assert cores.nodes_of([0, 1, 6]) == [0, 1, 0]
    assert cores.nodes_of([0, 99]) == []


def test_ranks_that_share_a_host_get_whole_nodes(machine):
    given = cores.arranged(range(8))
    ranks = [roles.Rank(rank=i, host="a", cpus=given) for i in range(2)]
    roles.assign_cores(ranks)
    assert [set(cores.nodes_of(r.cpus)) for r in ranks] == [{0}, {1}]


def test_a_restricted_process_keeps_to_its_cores():
    code = (
        "import os; from hpcdecode.ranks.team import assemble\n"
        "from hpcdecode.attention.shapes import LayerShape\n"
        "from hpcdecode.attention.open import open_kv_cache\n"
        "me = assemble(None).me\n"
        "s = open_kv_cache([LayerShape(1, 8, 8, 1, 1.0)], kv_dtype='float32', capacity_tokens=64, max_sequences=1,"
        " threads=me.threads, cpus=me.cpus)\n"
        "tasks = os.listdir('/proc/self/task')\n"
        "masks = [sorted(os.sched_getaffinity(int(t))) for t in tasks]\n"
        "print(me.cpus, me.threads, s.threads, all(set(m) <= set(me.cpus) for m in masks))\n"
    )
    cpu = CPUS[-1]
    line = ["taskset", "-c", str(cpu), sys.executable, "-c", code]
    done = subprocess.run(line, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == f"[{cpu}] 1 1 True"
