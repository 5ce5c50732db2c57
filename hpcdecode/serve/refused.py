"""Requests about files and batches that are refused: what the client is told."""

from __future__ import annotations


class RequestRefused(Exception):
    """A request cannot be honoured.

    Args:
        status: HTTP status of the answer.
        message: What was expected, what came and what to change.
        param: Name of the parameter that it is about.
        code: A word for programs, as the OpenAI API has them.
    """

    def __init__(self, status: int, message: str, param: str | None = None, code: str | None = None):
        super().__init__(message)
        self.status, self.message, self.param, self.code = status, message, param, code
