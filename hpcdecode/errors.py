"""Exceptions. The messages for users say what was expected, what came and what to change."""

from __future__ import annotations


class UserError(Exception):
    """The job cannot run as asked. The command prints the message without a traceback and exits with 2.

    Args:
        message: What was expected, what came and what to change.
        everywhere: Whether every rank raises the same error; then one rank prints it, and no rank waits for another.
    """

    def __init__(self, message: str, *, everywhere: bool = False):
        super().__init__(message)
        self.everywhere = everywhere


class PromptError(UserError, ValueError):
    """A prompt or its sampling parameters cannot be used. Nothing was generated."""


class InvariantViolation(Exception):
    """An invariant does not hold, which is a fault of hpcdecode. The job ends and writes nothing more.

    Args:
        name: Name of the invariant.
        problem: What was expected and what came.
    """

    def __init__(self, name: str, problem: str):
        super().__init__(
            f"invariant {name!r} does not hold: {problem}; this is a fault of hpcdecode, not of the job: rows finished "
            "before are kept, and the same command goes on from them"
        )
        self.name = name


class RankLost(Exception):
    """A rank is lost, and the job cannot go on without it."""


class RowProblem(Exception):
    """A row cannot be used. It is recorded under `/errors`, and the job goes on."""


class ParamsProblem(RowProblem, PromptError):
    """Sampling parameters cannot be made of the values that a caller gave."""


def first_line(error: BaseException) -> str:
    """Return the type of an exception and the first line of its message."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0][:200]}" if lines else type(error).__name__
