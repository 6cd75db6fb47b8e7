"""The process that serves: its socket, its signals, and how it ends."""

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

from ..aio.async_llm import AsyncLLM
from .app import create_app
from .config import ServerConfig
from .connection import HttpConnection
from .context import ServerContext

logger = logging.getLogger("pagespec")

# After the engine has ended, for clients to read what is written already; then their connections
# are closed, and for tasks to notice that.
_SEND_S, _SEND_LESS_S, _END_S = 2, 1, 3
# Longer than proxies keep a connection to a server (60 s): whoever closes first loses no request.
_KEEP_ALIVE_S = 65
# The engine's thread waits that long for the event loop to let go of the interpreter, at each of
# the moments in a step at which it had let go itself; Python's own 5 ms are longer than a step.
SWITCH_INTERVAL_S = 2e-4


def listen(config: ServerConfig) -> socket.socket:
    """The socket to serve at, which refuses connections until the server runs. Made first, as to
    load a model takes a while.

    Raises:
        OSError: the address is in use or none of this machine, or a certificate cannot be read.
    """
    if config.ssl_certfile is not None:
        ssl.create_default_context().load_cert_chain(config.ssl_certfile, config.ssl_keyfile)
    if config.uds is not None:
        with suppress(FileNotFoundError):
            if stat.S_ISSOCK(os.stat(config.uds).st_mode):
                os.unlink(config.uds)  # of a process that was killed
        family: socket.AddressFamily = socket.AF_UNIX
        protocol = 0
        address: Any = config.uds
    else:
        found = socket.getaddrinfo(config.host, config.port, type=socket.SOCK_STREAM)
        # asyncio sets TCP_NODELAY only where the protocol says TCP; without it an answer of two
        # writes waits 40 ms for the client's acknowledgement of the first.
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
    """Serve until a signal. Returns the exit code: 0, or of a second signal 128 and its number.

    At SIGTERM, SIGINT or SIGHUP (unless that is ignored, as under ``nohup``) ``/health`` fails at
    once, new requests are refused with 503, and what runs is answered, at most for
    ``drain_timeout_s``; what is left then ends with finish reason "abort". Clients have two more
    seconds to read that. At a second signal all of them end so, and the process after the step that
    runs; at a third one it ends at once.
    """
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    # What was loaded stays: to search it again for garbage would stop all threads each time.
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
            root_path=config.root_path,
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
    """uvicorn, which goes on listening while it drains: balancers must be told to go elsewhere."""

    def __init__(self, config: uvicorn.Config, context: ServerContext) -> None:
        super().__init__(config)
        self._context = context
        self._drain_until: float | None = None
        self._has_told = False
        self.exit_code = 0

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        for listener in sockets or ():
            logger.info("serving %s at %s", self._context.model_names[0], self._url(listener))

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:  # noqa: ARG002
        # In a signal's handler: nothing is logged or waited for.
        if self._drain_until is None:
            self._drain_until = time.monotonic() + self._context.config.drain_timeout_s
            self._context.is_draining = True
        elif not self.exit_code:
            self.exit_code = 128 + sig
            self.should_exit = True
        else:  # a step does not come to its end
            os._exit(128 + sig)

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """And that of a terminal that is closed, which would end the process in mid-stream."""
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
            await self._context.engine.shutdown()  # ends what runs after the step it is in
            send_s = _SEND_LESS_S
        timer = asyncio.get_running_loop().call_later(send_s, self._drop_connections)
        await super().shutdown(sockets)
        timer.cancel()

    def _drop_connections(self) -> None:
        """Whose peers do not read: their tasks end as those of clients that left."""
        for connection in list(self.server_state.connections):
            connection.transport.abort()

    async def on_tick(self, counter: int) -> bool:
        if self._drain_until is not None and not self.should_exit:
            await self._drain(self._drain_until)
        return await super().on_tick(counter)

    async def _drain(self, until: float) -> None:
        """Look whether it is over."""
        num_requests = self._context.num_requests
        if not self._has_told:
            self._has_told = True
            logger.info("shutting down; requests that run: %d", num_requests)
        if num_requests and time.monotonic() >= until:
            logger.warning("requests that run too long and are aborted: %d", num_requests)
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
