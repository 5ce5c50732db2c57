"""Errors of the server, in the form of the OpenAI API."""

from __future__ import annotations

import logging
from http import HTTPStatus
from typing import Any

import msgspec
from fastapi import FastAPI, HTTPException, Request, Response
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException as StarletteHTTPException
from starlette.requests import ClientDisconnect

from hpcdecode.data.prompts.live_feed import DeskClosed, DeskFull
from hpcdecode.data.prompts.rows import RowError, row_error
from hpcdecode.engine.live import FAILED, STOPPED
from hpcdecode.errors import RowProblem, first_line
from hpcdecode.requests.sequence import CANCELLED
from hpcdecode.serve.credentials import CHALLENGES

RETRY_SECONDS = 1  # after which a client may ask again
CLIENT_GONE = 499  # status, which nobody sees
_KINDS = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}
_CODES = {
    401: "invalid_api_key",
    403: "cross_site_request",
    413: "request_too_large",
    429: "queue_full",
    503: "unavailable",
}

logger = logging.getLogger(__name__)


class ApiError(HTTPException):
    """A request that is not answered as it asked.

    Args:
        status: HTTP status.
        message: What was expected, what came, what to change.
        param: Field of the request that it is about.
        code: A word for programs; None for that of the status.
    """

    def __init__(self, status: int, message: str, param: str | None = None, code: str | None = None) -> None:
        super().__init__(status, message, _headers(status))
        self.param, self.code = param, code or _CODES.get(status)

    @property
    def body(self) -> dict[str, Any]:
        """Return the body of the answer."""
        return error_body(self.status_code, str(self.detail), self.param, self.code)


def _headers(status: int) -> dict[str, str] | None:
    if status in (429, 503):
        return {"Retry-After": str(RETRY_SECONDS)}
    return {"Connection": "close"} if status == 413 else None


def error_body(status: int, message: str, param: str | None = None, code: str | None = None) -> dict[str, Any]:
    """Return the body of an answer that is an error."""
    kind = _KINDS.get(status, "invalid_request_error" if status < 500 else "server_error")
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def error_response(error: ApiError) -> Response:
    """Return an error as an answer."""
    response = _response(error.status_code, error.body, error.headers)
    for name, value in CHALLENGES if error.status_code == 401 else ():
        response.headers.append(name, value)
    return response


def unusable(problem: RowProblem) -> ApiError:
    """Return the answer to a request that cannot be used."""
    reason = row_error(0, None, problem).reason  # on one line, and not too long
    name = reason.partition(":")[0]
    return ApiError(400, reason, name if name.isidentifier() else None)


def of_submission(problem: Exception) -> ApiError:
    """Return the answer for what `LiveDesk.submit` raises."""
    if isinstance(problem, RowProblem):
        return unusable(problem)
    if isinstance(problem, DeskFull):
        return ApiError(429, "expected a queue with room, got one that is full; ask again later")
    if isinstance(problem, DeskClosed):
        return ApiError(503, "the server takes no more requests, as it is about to end; ask another one")
    logger.exception("hpcdecode: a request could not be read", exc_info=problem)
    return ApiError(500, f"the request could not be read: {first_line(problem)}")


def of_row(error: RowError) -> ApiError:
    """Return the answer for a row that ended with an error."""
    if error.reason.startswith(FAILED):
        return ApiError(500, error.reason)
    if error.reason == CANCELLED or error.reason.startswith(STOPPED):
        return ApiError(503, error.reason)
    return unusable(RowProblem(error.reason))


def add_handlers(app: FastAPI) -> None:
    """Let all errors of an app have the form of the OpenAI API."""

    @app.exception_handler(StarletteHTTPException)
    async def answered(request: Request, error: StarletteHTTPException) -> Response:
        if isinstance(error, ApiError):
            return error_response(error)
        message = str(error.detail)
        if error.status_code == 404 and message == HTTPStatus(404).phrase:
            message = f"{request.method} {request.url.path}: expected one of the paths in /openapi.json"
        return _response(error.status_code, error_body(error.status_code, message), dict(error.headers or {}))

    @app.exception_handler(RequestValidationError)
    async def invalid(_: Request, error: RequestValidationError) -> Response:
        first = error.errors()[0]
        place = ".".join(str(part) for part in first.get("loc", ())[1:])
        return error_response(ApiError(400, f"{place or 'request'}: {first.get('msg', 'invalid')}", place or None))

    @app.exception_handler(ClientDisconnect)
    async def gone(_: Request, __: ClientDisconnect) -> Response:
        return Response(status_code=CLIENT_GONE)  # while it sent its body

    @app.exception_handler(Exception)
    async def failed(_: Request, error: Exception) -> Response:
        return error_response(ApiError(500, f"the server failed: {first_line(error)}"))


def _response(status: int, body: dict[str, Any], headers: Any) -> Response:
    text = msgspec.json.encode(body)
    return Response(text, status, headers=headers, media_type="application/json")
