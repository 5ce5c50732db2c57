"""`hpcdecode doctor`: the resources of every rank, and what to change if something is wrong."""

from __future__ import annotations

from hpcdecode.doctor.run import binding, doctor

__all__ = ["binding", "doctor"]
