"""What worlds are compared with."""

from __future__ import annotations

import pytest

from tests.support.commands import Command
from tests.support.worlds import FLAGS, PROMPTS, contents


@pytest.fixture(scope="session")
def alone(tmp_path_factory, forkserver):
    """Rows, topology and summary of one process."""
    command = Command(tmp_path_factory.mktemp("alone"), forkserver)
    result = command("generate", PROMPTS, "-o", "out.h5", *FLAGS)
    assert result.returncode == 0, result.stderr
    return contents(command.directory / "out.h5")
