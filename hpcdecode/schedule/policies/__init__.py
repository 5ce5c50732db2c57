"""Schedules by name: when a lane admits sequences, and how many. A new one is a file here and a line in POLICIES."""

from __future__ import annotations

from hpcdecode.schedule.limits import LaneLimits
from hpcdecode.schedule.policies.base import Policy
from hpcdecode.schedule.policies.fifo import Fifo
from hpcdecode.schedule.policies.fixed_f import FixedF
from hpcdecode.schedule.policies.load_control import LoadControl
from hpcdecode.schedule.policies.static import Static

POLICIES: dict[str, type[Policy]] = {
    "fixed-f": FixedF,
    "load-control": LoadControl,
    "static": Static,
    "fifo": Fifo,
    "fluid": FixedF,  # into a KV cache that is larger than its memory
}


def policy_of(limits: LaneLimits) -> Policy:
    """Return the policy of a lane with these limits."""
    return POLICIES[limits.schedule](limits)
