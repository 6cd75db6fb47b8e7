"""Run a server over any engine with uvicorn on a thread, for tests that need real connections."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import uvicorn
from fastapi import FastAPI

from pagespec import LLM, AsyncLLM
from pagespec.server.app import create_app
from pagespec.server.config import ServerConfig
from pagespec.server.connection import HttpConnection
from pagespec.server.run import listen

_START_S = 20.0


@contextmanager
def serving(llm: LLM | AsyncLLM, **config: Any) -> Iterator[str]:
    """The base URL of a server. On exit, the server and the engine's thread end.

    Args:
        llm: an ``LLM``, or an ``AsyncLLM`` if the test uses it as well.
        config: of ``ServerConfig``.
    """
    engine = llm if isinstance(llm, AsyncLLM) else AsyncLLM(llm)
    with running(create_app(engine, ServerConfig(**config))) as url:
        yield url


@contextmanager
def running(app: FastAPI, **settings: Any) -> Iterator[str]:
    """The base URL of an app.

    Args:
        settings: of ``uvicorn.Config``.
    """
    listener = listen(ServerConfig(host="127.0.0.1", port=0))
    connection: dict[str, Any] = {"http": HttpConnection, "ws": "none"}  # as run.serve has it
    settings = {"log_level": "warning", "timeout_graceful_shutdown": 5} | connection | settings
    server = uvicorn.Server(uvicorn.Config(app, **settings))
    thread = threading.Thread(target=server.run, args=([listener],), daemon=True)
    thread.start()
    until = time.monotonic() + _START_S
    while not server.started:
        assert thread.is_alive(), "the server did not start"
        assert time.monotonic() < until, "the server took too long to start"
        time.sleep(0.01)
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join(30)
        assert not thread.is_alive(), "the server did not end"
        listener.close()


def client(app: FastAPI, root_path: str = "", **settings: Any) -> httpx.AsyncClient:
    """A client that calls an app directly, in the test's own event loop."""
    transport = httpx.ASGITransport(app, raise_app_exceptions=False, root_path=root_path)
    return httpx.AsyncClient(transport=transport, base_url="http://test", **settings)
