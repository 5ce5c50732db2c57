"""The application: routes, errors, and the guard before them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

from fastapi import APIRouter, FastAPI
from fastapi.openapi.utils import get_openapi

from hpcdecode._version import __version__
from hpcdecode.serve.context import Context
from hpcdecode.serve.errors import add_handlers
from hpcdecode.serve.files.upload import FORM_BYTES
from hpcdecode.serve.generation import generation_router
from hpcdecode.serve.guard import Guard
from hpcdecode.serve.info import info_router
from hpcdecode.serve.metrics import ServerMetrics, metrics_router
from hpcdecode.serve.page import page_router
from hpcdecode.serve.tokens import tokens_router

ROUTERS: tuple[Callable[[Context], APIRouter], ...] = (info_router, generation_router, tokens_router)


def make_app(context: Context) -> FastAPI:
    """Return the application of a server, for one event loop.

    Args:
        context: What its routes share. Rows' events reach them once the application has started.
    """

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        context.hub.bind(asyncio.get_running_loop())
        yield
        context.hub.close()

    def openapi() -> dict[str, Any]:
        """Return the schema, without the answers of FastAPI's own checks, which are errors of another status here."""
        if app.openapi_schema is None:
            app.openapi_schema = get_openapi(title=app.title, version=app.version, routes=app.routes)
            for path in app.openapi_schema["paths"].values():
                for operation in path.values():
                    operation["responses"].pop("422", None)
        return app.openapi_schema

    options, metrics = context.options, ServerMetrics(context)
    context.hub.observe = context.batches.desk.observe = metrics.observe
    # The pages /docs and /redoc of FastAPI would load scripts from the network.
    app = FastAPI(title="hpcdecode", version=__version__, docs_url=None, redoc_url=None, lifespan=lifespan)
    app.openapi = openapi  # type: ignore[method-assign]
    add_handlers(app)
    app.add_middleware(Guard, keys=options.api_keys, most=options.max_body, most_file=options.max_file + FORM_BYTES)
    routers = (router(context) for router in ROUTERS)
    for router in (*routers, metrics_router(metrics), context.batches.router, page_router(context)):
        app.include_router(router)
    return app
