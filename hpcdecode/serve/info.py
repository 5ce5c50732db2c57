"""The routes that say what the server is: `/v1/models`, `/health`, `/version`."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter
from fastapi.responses import JSONResponse

from hpcdecode._version import __version__
from hpcdecode.serve.bodies import require_model
from hpcdecode.serve.context import Context
from hpcdecode.serve.errors import ApiError
from hpcdecode.serve.failures import errors


def info_router(context: Context) -> APIRouter:
    """Return the routes that say what the server is."""
    router = APIRouter()

    @router.get("/v1/models", responses=errors(401))
    async def models() -> JSONResponse:
        """Return the names of the model, and of its adapters."""
        return JSONResponse({"object": "list", "data": [_model(name, context) for name in context.names]})

    @router.get("/v1/models/{model:path}", responses=errors(401, 404))
    async def model(model: str) -> JSONResponse:
        """Return what is known of the model."""
        require_model(model, context)
        return JSONResponse(_model(model, context))

    @router.get("/health", responses=errors(401, 503))
    async def health() -> JSONResponse:
        """Tell whether requests are taken."""
        if context.desk.closed:
            raise ApiError(503, "the server takes no more requests, as it is about to end")
        return JSONResponse({"status": "ok"})

    @router.get("/version", responses=errors(401))
    async def version() -> JSONResponse:
        """Return the version of hpcdecode."""
        return JSONResponse({"version": __version__})

    return router


def _model(name: str, context: Context) -> dict[str, Any]:
    about = {
        "id": name,
        "object": "model",
        "created": context.created,
        "owned_by": "hpcdecode",
        "max_model_len": context.max_model_len,
    }
    return {**about, "parent": context.models[0]} if name in context.adapters else about
