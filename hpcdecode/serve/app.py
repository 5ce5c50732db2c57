"""The application: routes, errors, and the guard before them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from fastapi import FastAPI

from hpcdecode._version import __version__
from hpcdecode.serve.context import Context
from hpcdecode.serve.errors import add_handlers
from hpcdecode.serve.generation import generation_router
from hpcdecode.serve.guard import Guard
from hpcdecode.serve.info import info_router
from hpcdecode.serve.metrics import ServerMetrics, metrics_router
from hpcdecode.serve.tokens import tokens_router


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

    metrics = ServerMetrics(context)
    context.hub.observe = metrics.observe
    # The pages /docs and /redoc of FastAPI would load scripts from the network.
    app = FastAPI(title="hpcdecode", version=__version__, docs_url=None, redoc_url=None, lifespan=lifespan)
    add_handlers(app)
    app.add_middleware(Guard, keys=context.options.api_keys, most=context.options.max_body)
    routers = (info_router(context), generation_router(context), tokens_router(context), metrics_router(metrics))
    for router in routers:
        app.include_router(router)
    return app
