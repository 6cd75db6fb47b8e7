"""The ASGI app of a server."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from fastapi import FastAPI
from starlette.middleware.cors import CORSMiddleware

from .. import __version__
from ..serving.async_llm import AsyncLLM
from . import admin, basic, chat, completions, generate, invocations, tokenization
from .config import ServerConfig
from .connection import WRITE_TIMEOUT
from .context import ServerContext
from .errors import add_error_handlers
from .limits import Limits
from .live import LiveView, live_router
from .metrics import EngineMetrics, HttpRequestCounts
from .openapi import describe_truly
from .page_files import page_router
from .prometheus import metrics_router
from .requests import Requests
from .sampling import SamplingDefaults
from .security import ApiKeys

# Each module has a ``router``.
ENDPOINTS = (basic, chat, completions, generate, invocations, tokenization)


def create_app(engine: AsyncLLM, config: ServerConfig | None = None) -> FastAPI:
    """An app that serves ``engine`` and shuts it down when the app ends.

    A request passes, from outermost to innermost: ``requests``, CORS, API keys, limits, FastAPI's
    checks. So the body of a request without a valid key is not read, and every error response has
    CORS headers.

    Raises:
        InvalidInputError: the engine's generation config has a value that is refused.
    """
    context = ServerContext(engine, config or ServerConfig(), SamplingDefaults.of(engine.llm))
    if len(context.config.api_keys) > 1:
        engine.expect_several_owners()
    # Each text is encoded on one thread: long texts would occupy a tokenizer's shared threads.
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

    @asynccontextmanager
    async def lifespan(_app: FastAPI) -> AsyncIterator[dict[str, Any]]:
        try:
            yield {WRITE_TIMEOUT: context.config.write_timeout_s}
        finally:
            await engine.shutdown()

    app = FastAPI(
        title="pagespec",
        version=__version__,
        lifespan=lifespan,
        # FastAPI's pages load scripts from other hosts. The document itself is at /openapi.json.
        docs_url=None,
        redoc_url=None,
    )
    app.state.context = context
    add_error_handlers(app)
    for module in ENDPOINTS:
        app.include_router(module.router)
    metrics, counts = EngineMetrics(engine), HttpRequestCounts()
    app.include_router(metrics_router(metrics, counts, context.model_names[0]))
    app.include_router(live_router(LiveView(metrics)))
    app.include_router(page_router())
    if context.config.enable_admin:
        app.include_router(admin.router)
    describe_truly(app)
    _add_middlewares(app, context, counts)
    return app


def _add_middlewares(app: FastAPI, context: ServerContext, counts: HttpRequestCounts) -> None:
    """Add the middlewares, innermost first."""
    config = context.config
    app.add_middleware(Limits, context=context)
    if config.api_keys:
        app.add_middleware(ApiKeys, keys=config.api_keys)
    if config.cors_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=config.cors_origins,
            allow_methods=["*"],
            allow_headers=["*"],
            expose_headers=["X-Request-Id", "Retry-After"],
        )
    app.add_middleware(Requests, log=config.access_log, root_path=config.root_path, counts=counts)
