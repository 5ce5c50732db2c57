"""Ranks on nodes of their own, which share no memory: emulated ones, joined by a network."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from tests.support.commands import Command, run
from tests.support.nodes import Nodes, needs_nodes
from tests.support.worlds import FLAGS, PROMPTS, contents

pytestmark = [needs_nodes, pytest.mark.skipif((Path(sys.executable).parent / "prterun").exists(), reason="for Hydra")]


@pytest.fixture(scope="module")
def nodes(tmp_path_factory):
    with Nodes(3, tmp_path_factory.mktemp("nodes")) as made:
        yield made


@pytest.fixture(scope="module")
def alone(tmp_path_factory, forkserver):
    command = Command(tmp_path_factory.mktemp("alone"), forkserver)
    result = command("generate", PROMPTS, "-o", "out.h5", *FLAGS)
    assert result.returncode == 0, result.stderr
    return contents(command.directory / "out.h5")[0]


@pytest.mark.parametrize(
    "flags",
    [("--layout", "split"), ("--layout", "split", "--exchange", "messages"), ()],
    ids=["auto", "messages", "replicas"],
)
def test_nodes_make_the_rows_of_one_process(hpcdecode, nodes, alone, tmp_path, flags):
    line = nodes.line(sys.executable, "-m", "hpcdecode", "generate", PROMPTS, "-o", tmp_path / "out.h5", *FLAGS, *flags)
    result = run(line, cwd=tmp_path, env=hpcdecode.environment)
    assert result.returncode == 0, result.stderr
    rows, topology, _ = contents(tmp_path / "out.h5")
    assert rows == alone and [rank["host"] for rank in topology] == ["node0", "node1", "node2"]
    tried = "exchange: " in result.stderr and "collectives take" in result.stderr
    assert tried == (flags == ("--layout", "split"))


def test_the_exchange_between_nodes_is_measured_both_ways(hpcdecode, nodes, tmp_path):
    line = (sys.executable, "-m", "hpcdecode", "bench", "exchange", "--rows", 4, "--hidden", 1024, "--passes", 2)
    result = run(nodes.line(*line, "--json"), cwd=tmp_path, env=hpcdecode.environment)
    assert result.returncode == 0, result.stderr
    found = {case["case"].rpartition(": ")[2] for case in json.loads(result.stdout)["cases"]}
    assert {"messages", "neighbours"} <= found
