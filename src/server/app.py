"""The ASGI app of a server."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from fastapi import FastAPI

from .. import __version__
from ..aio.async_llm import AsyncLLM
from . import basic, chat, completions, generate
from .config import ServerConfig
from .context import ServerContext
from .errors import add_error_handlers
from .live import LiveView, live_router
from .metrics import EngineMetrics
from .page_files import page_router
from .prometheus import metrics_router

# Each has a ``router``.
ENDPOINTS = (basic, completions, chat, generate)


def create_app(engine: AsyncLLM, config: ServerConfig | None = None) -> FastAPI:
    """An app that serves ``engine``, which is shut down with it. It can be mounted in others."""
    context = ServerContext(engine, config or ServerConfig())

    @asynccontextmanager
    async def lifespan(_app: FastAPI) -> AsyncIterator[None]:
        try:
            yield
        finally:
            await engine.shutdown()

    app = FastAPI(
        title="pagespec",
        version=__version__,
        lifespan=lifespan,
        root_path=context.config.root_path,
        # They load scripts from elsewhere. The document itself is at /openapi.json.
        docs_url=None,
        redoc_url=None,
    )
    app.state.context = context
    add_error_handlers(app)
    for module in ENDPOINTS:
        app.include_router(module.router)
    metrics = EngineMetrics(engine)
    app.include_router(metrics_router(metrics, context.model_names[0]))
    app.include_router(live_router(LiveView(metrics)))
    app.include_router(page_router())
    return app
