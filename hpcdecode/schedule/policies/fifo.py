"""Continuous batching (Orca; Lamina's default): a row enters as soon as there is room for it."""

from __future__ import annotations

from hpcdecode.schedule.policies.base import Policy


class Fifo(Policy):
    """All that `Policy` does by itself."""
