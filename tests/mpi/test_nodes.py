"""Ranks on nodes of their own, which share no memory: emulated ones, joined by a network."""

from __future__ import annotations

import json

import pytest

from hpcdecode.bench.nodes import Nodes
from tests.support.commands import run
from tests.support.nodes import needs_nodes
from tests.support.worlds import FLAGS, PROMPTS, WEIGHTS_MIB, contents

pytestmark = needs_nodes


@pytest.fixture(scope="module")
def nodes():
    with Nodes(3) as made:
        yield made


@pytest.fixture(scope="module")
def rank(forkserver):
    """The command of a rank, but for its arguments."""
    return forkserver.rank("hpcdecode")


@pytest.mark.parametrize(
    "flags",
    [("--layout", "split"), ("--layout", "split", "--exchange", "messages"), ()],
    ids=["auto", "messages", "replicas"],
)
def test_nodes_make_the_rows_of_one_process(hpcdecode, nodes, rank, alone, tmp_path, flags):
    line = nodes.line(*rank, "generate", PROMPTS, "-o", tmp_path / "out.h5", *FLAGS, *flags)
    result = run(line, cwd=tmp_path, env=hpcdecode.environment)
    assert result.returncode == 0, result.stderr
    rows, topology, _ = contents(tmp_path / "out.h5")
    assert rows == alone[0] and [rank["host"] for rank in topology] == ["node0", "node1", "node2"]
    tried = "exchange: " in result.stderr and "collectives take" in result.stderr
    assert tried == (flags == ("--layout", "split"))


def test_an_r_rank_beside_the_s_rank_and_others_away_from_it(hpcdecode, nodes, rank, alone, tmp_path):
    """The first steps go by collectives and by messages in turn; the R-rank beside has shared memory in all."""
    command = (*rank, "generate", PROMPTS, "-o", tmp_path / "out.h5", *FLAGS, "--s-ranks", 1)
    result = run(nodes.line(*command, first=2), cwd=tmp_path, env=hpcdecode.environment)
    assert result.returncode == 0, result.stderr
    rows, topology, _ = contents(tmp_path / "out.h5")
    assert rows == alone[0] and [rank["host"] for rank in topology] == ["node0", "node0", "node1", "node2"]
    assert "collectives take" in result.stderr


@pytest.mark.parametrize(
    ("flags", "memory", "said"),
    [
        (("--pp", 3), None, "layout: one model of 3 stages, each rank with both roles"),
        ((), 0.9, "layout: one model of 3 ranks, each rank with both roles: weights do not fit on every rank of node0"),
    ],
    ids=["stages", "by memory"],
)
def test_nodes_share_a_model(hpcdecode, nodes, rank, alone, tmp_path, flags, memory, said):
    """Also without a flag, if Slurm grants each less memory than the weights take."""
    environment = dict(hpcdecode.environment)
    if memory is not None:
        environment["SLURM_MEM_PER_NODE"] = str(int(memory * WEIGHTS_MIB))
    line = nodes.line(*rank, "generate", PROMPTS, "-o", tmp_path / "out.h5", *FLAGS, *flags)
    result = run(line, cwd=tmp_path, env=environment)
    assert result.returncode == 0 and said in result.stderr, result.stderr
    assert contents(tmp_path / "out.h5")[0] == alone[0]


def test_the_exchange_between_nodes_is_measured_both_ways(hpcdecode):
    flags = ("--nodes", 2, "--rows", 4, "--hidden", 1024, "--passes", 2, "--progress", "--json")
    result = hpcdecode("bench", "exchange", *flags)
    assert result.returncode == 0, result.stderr
    found = json.loads(result.stdout)
    assert found["machine"]["hosts"] == 2
    held = {(case["case"].rpartition(": ")[2], case["reference"]) for case in found["cases"]}
    assert {("messages", "raw messages"), ("collective", "raw neighbours"), ("collective", "messages")} <= held
    assert ("collective left after a slice", "time of collective") in held


def test_doctor_times_both_ways_between_nodes(hpcdecode, nodes, rank, tmp_path):
    line = nodes.line(*rank, "doctor", "--json")
    result = run(line, cwd=tmp_path, env=hpcdecode.environment)
    exchange = json.loads(result.stdout)["exchange"]
    assert exchange["hosts"] == 2 and exchange["kept"] in ("messages", "collective")
    assert min(exchange["messages_us"], exchange["collective_us"]) > 0
