"""Real jobs whose layout a profile chooses: what they print, and that their rows are those of one process."""

from __future__ import annotations

import re

import pytest

from tests.support.commands import Command
from tests.support.profiles import profile, write
from tests.support.worlds import FLAGS, PROMPTS, contents


@pytest.fixture(scope="module")
def alone(tmp_path_factory, forkserver):
    command = Command(tmp_path_factory.mktemp("alone"), forkserver)
    result = command("generate", PROMPTS, "-o", "out.h5", *FLAGS)
    assert result.returncode == 0, result.stderr
    return contents(command.directory / "out.h5")[0]


@pytest.mark.parametrize(
    ("slower", "chosen", "other", "roles"),
    [
        (1, "3 replicas, each rank with both roles", r"\d S \+ \d R.*", {"SR"}),
        (100, r"\d S \+ \d R", "3 replicas", {"S", "R"}),
    ],
)
def test_a_job_takes_the_layout_that_its_profile_predicts(hpcdecode, tmp_path, alone, slower, chosen, other, roles):
    path = write(tmp_path / "profile.json", profile(3, slower_replicas=slower))
    result = hpcdecode("generate", PROMPTS, "-o", "out.h5", *FLAGS, "--profile", path, ranks=3)
    assert result.returncode == 0, result.stderr
    rows, topology, _ = contents(tmp_path / "out.h5")
    assert {rank["role"] for rank in topology} == roles
    said = rf"layout: {chosen}: [\d,]+ tokens/s predicted\n  {other}: 0\.\d\d of that \(--layout [^)]+\)\n"
    assert re.search(said, result.stderr), result.stderr
    assert rows == alone
