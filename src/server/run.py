"""The server process: socket, signals, shutdown."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import signal
import socket
import ssl
import stat
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any

import uvicorn

from ..serving.async_llm import AsyncLLM
from .app import create_app
from .config import ServerConfig
from .connection import HttpConnection
from .context import ServerContext

logger = logging.getLogger("pagespec")

# Seconds after the engine's end: for clients to read written data (fewer after a second signal),
# and for tasks to notice closed connections.
_SEND_S, _SEND_LESS_S, _END_S = 2, 1, 3
# Longer than proxies keep an idle connection (60 s). The proxy closes first, so no request is lost.
_KEEP_ALIVE_S = 65
# Maximum wait of the engine's thread for the GIL after each release within a step. Python's default
# of 5 ms is longer than a step.
SWITCH_INTERVAL_S = 2e-4


def listen(config: ServerConfig) -> socket.socket:
    """The server's socket, bound before the slow load of a model. It refuses connections until the
    server runs.

    Raises:
        OSError: the address is in use or not local, or a certificate cannot be read.
    """
    if config.ssl_certfile is not None:
        ssl.create_default_context().load_cert_chain(config.ssl_certfile, config.ssl_keyfile)
    if config.uds is not None:
        with suppress(FileNotFoundError):
            if stat.S_ISSOCK(os.stat(config.uds).st_mode):
                os.unlink(config.uds)  # left by a killed process
        family: socket.AddressFamily = socket.AF_UNIX
        protocol = 0
        address: Any = config.uds
    else:
        found = socket.getaddrinfo(config.host, config.port, type=socket.SOCK_STREAM)
        # asyncio sets TCP_NODELAY only if the protocol is TCP. Without it an answer of two writes
        # waits 40 ms for the client's acknowledgement of the first write.
        family, _, protocol, _, address = found[0]
    listener = socket.socket(family, socket.SOCK_STREAM, protocol)
    try:
        if config.uds is None:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
    except OSError as error:
        listener.close()
        where = config.uds or f"{config.host}:{config.port}"
        raise OSError(error.errno, f"cannot listen at {where}: {error.strerror}") from error
    return listener


def serve(engine: AsyncLLM, config: ServerConfig, listener: socket.socket) -> int:
    """Serve until a signal. Returns the exit code: 0, or 128 plus the number of a second signal.

    At SIGTERM, SIGINT or SIGHUP (unless ignored, as under ``nohup``) ``/health`` fails at once, new
    requests get status 503, and running ones have ``drain_timeout_s`` to finish. The others then
    end with finish reason "abort", and clients have two more seconds to read that. A second signal
    aborts all requests and ends the process after the current step; a third one ends it at once.
    """
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    # The loaded objects stay alive; scanning them again would stop all threads each time.
    gc.collect()
    gc.freeze()
    app = create_app(engine, config)
    server = _Server(
        uvicorn.Config(
            app,
            http=HttpConnection,
            ws="none",
            lifespan="on",
            log_config=None,
            access_log=False,
            server_header=False,
            ssl_keyfile=config.ssl_keyfile,
            ssl_certfile=config.ssl_certfile,
            timeout_keep_alive=_KEEP_ALIVE_S,
            timeout_graceful_shutdown=_SEND_S + _END_S,
        ),
        app.state.context,
    )
    try:
        server.run([listener])
    finally:
        if config.uds is not None:
            with suppress(FileNotFoundError):
                os.unlink(config.uds)
    return server.exit_code


class _Server(uvicorn.Server):
    """uvicorn that keeps listening while it drains, so that load balancers see ``/health`` fail."""

    def __init__(self, config: uvicorn.Config, context: ServerContext) -> None:
        super().__init__(config)
        self._context = context
        self._drain_until: float | None = None
        self._is_logged = False
        self.exit_code = 0

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        for listener in sockets or ():
            logger.info("serving %s at %s", self._context.model_names[0], self._url(listener))

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:  # noqa: ARG002
        # Runs in a signal handler: it must not log or wait.
        if self._drain_until is None:
            self._drain_until = time.monotonic() + self._context.config.drain_timeout_s
            self._context.is_draining = True
        elif not self.exit_code:
            self.exit_code = 128 + sig
            self.should_exit = True
        else:  # third signal: the step may hang
            os._exit(128 + sig)

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Also handle SIGHUP, which would otherwise end the process inside a stream."""
        is_ours = threading.current_thread() is threading.main_thread() and (
            hasattr(signal, "SIGHUP") and signal.getsignal(signal.SIGHUP) is signal.SIG_DFL
        )
        if is_ours:
            signal.signal(signal.SIGHUP, self.handle_exit)
        try:
            with super().capture_signals():
                yield
        finally:
            if is_ours:
                signal.signal(signal.SIGHUP, signal.SIG_DFL)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        send_s = _SEND_S
        if self.exit_code:
            await self._context.engine.shutdown()  # aborts all requests after the current step
            send_s = _SEND_LESS_S
        timer = asyncio.get_running_loop().call_later(send_s, self._drop_connections)
        await super().shutdown(sockets)
        timer.cancel()

    def _drop_connections(self) -> None:
        """Close connections whose clients do not read, which cancels their tasks."""
        for connection in list(self.server_state.connections):
            connection.transport.abort()

    async def on_tick(self, counter: int) -> bool:
        if self._drain_until is not None and not self.should_exit:
            await self._drain(self._drain_until)
        return await super().on_tick(counter)

    async def _drain(self, until: float) -> None:
        """End the server when no request is left or the time has expired."""
        num_requests = self._context.num_requests
        if not self._is_logged:
            self._is_logged = True
            logger.info("shutting down; running requests: %d", num_requests)
        if num_requests and time.monotonic() >= until:
            logger.warning("drain timeout; running requests that are aborted: %d", num_requests)
            await self._context.engine.shutdown()
            num_requests = 0
        self.should_exit = self.should_exit or num_requests == 0

    def _url(self, listener: socket.socket) -> str:
        address = listener.getsockname()
        if isinstance(address, str):
            return f"unix:{address}"
        scheme = "http" if self.config.ssl_certfile is None else "https"
        host = f"[{address[0]}]" if ":" in address[0] else address[0]
        return f"{scheme}://{host}:{address[1]}"
