"""The mark of tests that need emulated nodes."""

from __future__ import annotations

import pytest

from hpcdecode.bench.nodes import obstacle

_OBSTACLE = obstacle()
needs_nodes = pytest.mark.skipif(_OBSTACLE is not None, reason=f"no emulated nodes: {_OBSTACLE}")
