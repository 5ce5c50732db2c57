"""What the tests of benchmarks share."""

from __future__ import annotations

import pytest

from hpcdecode.bench.workload import checkpoint


@pytest.fixture(scope="module")
def work(tmp_path_factory):
    """A work folder with the tiny checkpoint."""
    folder = tmp_path_factory.mktemp("bench")
    checkpoint(folder, "tiny")
    return folder
