"""Errors that a user can mend. Every message says what was expected, what came and what to change."""

from __future__ import annotations


class UserError(Exception):
    """The job cannot run as asked; the command prints the message without a traceback and exits with 2.

    everywhere: every rank raises the same error, so that no rank waits for another and one of them prints it.
    """

    def __init__(self, message: str, *, everywhere: bool = False):
        super().__init__(message)
        self.everywhere = everywhere


class InvariantViolation(Exception):
    """A check that must always hold has failed: a fault of hpcdecode. The job ends, and what it holds is not written.

    Args:
        name: of the invariant.
        problem: what was expected and what came.
    """

    def __init__(self, name: str, problem: str):
        super().__init__(
            f"invariant {name!r} does not hold: {problem}; this is a fault of hpcdecode, not of the job: rows finished "
            "before are kept, and the same command goes on from them"
        )
        self.name = name


class RankLost(Exception):
    """A rank is gone without which the job cannot go on."""


class RowProblem(Exception):
    """One row cannot be used; it becomes an entry under `/errors` and the job goes on."""


def first_line(error: BaseException) -> str:
    """The exception's type and first line."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0][:200]}" if lines else type(error).__name__
