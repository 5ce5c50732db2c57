"""`hpcdecode doctor`: what every rank has been given, and what to change where something is wrong."""

from __future__ import annotations

from hpcdecode.doctor.run import binding, doctor

__all__ = ["binding", "doctor"]
