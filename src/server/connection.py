"""uvicorn's HTTP connection, with header-size, header-time and write-time limits (slowloris)."""

from __future__ import annotations

import asyncio
import logging
import re
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from .errors import ApiError
from .limits import MAX_HEADER_BYTES

HEADER_TIMEOUT_S = 20.0
# Time limit for the rest of a body whose answer was sent before the body's end.
DISCARD_TIMEOUT_S = 20.0
# Key in the state of the app's lifespan: maximum seconds without a byte read by the client.
WRITE_TIMEOUT = "pagespec.write_timeout_s"
logger = logging.getLogger("pagespec")
_UPGRADE = re.compile(rb"\r\nupgrade:", re.IGNORECASE)


class HttpConnection(HttpToolsProtocol):
    """A connection with limits that uvicorn lacks. It is closed if a request's headers exceed a
    time or a number of bytes, or if the client reads no byte for a time.

    Protocol upgrades are ignored (Java's client offers HTTP/2). httptools drops the body after an
    Upgrade header, so the header is renamed, unless its name arrives in two packets.
    """

    _timer: asyncio.TimerHandle | None = None
    _discarding: asyncio.TimerHandle | None = None
    _num_bytes = 0
    _is_at_headers = True
    _has_begun = False  # whether the expected headers begin in the data being read
    _writes: _Writes | None = None
    _running: Any = None  # the cycle being answered; ``cycle`` is the newest one

    def connection_made(self, transport: Any) -> None:
        limit_s = self.app_state.get(WRITE_TIMEOUT)
        if limit_s is not None:
            transport = self._writes = _Writes(transport, self.loop, limit_s)
        super().connection_made(transport)
        self._expect_headers()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer()
        self._stop_discarding()
        if self._writes is not None:
            self._writes.stop()
        running = self._running
        if running is not None and not running.response_complete:
            # uvicorn reports the disconnect only to the last request of a connection.
            running.disconnected = True
            running.message_event.set()
        super().connection_lost(exc)

    def _start_asgi_task(self, cycle: Any, app: Any) -> None:
        self._running = cycle
        super()._start_asgi_task(cycle, app)

    def data_received(self, data: bytes) -> None:
        if self._is_at_headers:
            headers, end, rest = data.partition(b"\r\n\r\n")
            data = _UPGRADE.sub(b"\r\nX-Upgrade:", headers) + end + rest
        self._has_begun = False
        super().data_received(data)
        # Data in which the headers begin may also end another request's body: it does not count.
        if self._timer is not None and not self._has_begun:
            self._num_bytes += len(data)
            if self._num_bytes > MAX_HEADER_BYTES:
                self._give_up(431, f"the headers have more than {MAX_HEADER_BYTES} bytes")

    def on_message_begin(self) -> None:
        super().on_message_begin()
        if self._timer is None:  # not the first request of the connection
            self._has_begun = True
            self._expect_headers()

    def on_headers_complete(self) -> None:
        self._stop_timer()
        self._is_at_headers = False
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        self._is_at_headers = True
        self._stop_discarding()
        super().on_message_complete()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if not self._is_at_headers and self.cycle.response_complete:
            self._discarding = self.loop.call_later(DISCARD_TIMEOUT_S, self.transport.close)

    def _stop_discarding(self) -> None:
        if self._discarding is not None:
            self._discarding.cancel()
            self._discarding = None

    def _expect_headers(self) -> None:
        self._num_bytes = 0
        message = f"the headers took longer than {HEADER_TIMEOUT_S:g} s"
        self._timer = self.loop.call_later(HEADER_TIMEOUT_S, self._give_up, 408, message)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _give_up(self, status: int, message: str) -> None:
        self._stop_timer()
        if self.transport.is_closing():
            return
        if self.cycle is not None and not self.cycle.response_complete:
            # The previous request is being answered; nothing may be written in between.
            self.cycle.keep_alive = False
            if status == 431:
                self.flow.pause_reading()
                self.flow.read_paused = False  # permanently: the answer's end closes it
            return
        if status == 408 and not self._num_bytes:
            self.transport.close()  # opened in advance, as browsers do: a client would take an
            return  # answer for that of its next request
        answer = ApiError(status, message).response({"Connection": "close"})
        lines = [f"HTTP/1.1 {status} ".encode()]
        lines += [name + b": " + value for name, value in answer.raw_headers]
        self.transport.write(b"\r\n".join([*lines, b"", answer.body]))
        self.transport.close()


class _Writes:
    """A transport that is aborted if the client reads no byte for ``limit_s`` seconds.

    Written data stays in the transport's buffer until the client's TCP window has space. A client
    that never reads would hold a request, its blocks and its answer forever.
    """

    def __init__(self, transport: Any, loop: asyncio.AbstractEventLoop, limit_s: float) -> None:
        self._transport, self._loop, self._limit_s = transport, loop, limit_s
        self._num_written = self._num_taken = 0
        self._taken_at = loop.time()
        self._timer: asyncio.TimerHandle | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def write(self, data: bytes) -> None:
        self._num_written += len(data)
        self._transport.write(data)
        if self._timer is None and self._transport.get_write_buffer_size():
            self._num_taken, self._taken_at = self._count(), self._loop.time()
            self._timer = self._loop.call_later(self._limit_s / 4, self._check_progress)

    def stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _count(self) -> int:
        return self._num_written - self._transport.get_write_buffer_size()

    def _check_progress(self) -> None:
        self._timer = None
        if not self._transport.get_write_buffer_size():
            return
        num_taken, now = self._count(), self._loop.time()
        if num_taken != self._num_taken:
            self._num_taken, self._taken_at = num_taken, now
        elif now - self._taken_at >= self._limit_s:
            logger.info("closed a connection: its client read no byte for %g s", self._limit_s)
            self._transport.abort()
            return
        self._timer = self._loop.call_later(self._limit_s / 4, self._check_progress)
