"""Continuous batching (Orca; Lamina's default): a request enters as soon as there is headroom for it."""

from __future__ import annotations

from hpcdecode.schedule.policies.base import Policy


class Fifo(Policy):
    """Does what `Policy` does by itself."""
