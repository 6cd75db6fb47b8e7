"""uvicorn's HTTP connection, with limits for who never comes to an end."""

from __future__ import annotations

import asyncio
import re
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from .errors import ApiError
from .limits import MAX_HEADER_BYTES

HEADER_TIMEOUT_S = 20.0
_UPGRADE = re.compile(rb"\r\nupgrade:", re.IGNORECASE)


class HttpConnection(HttpToolsProtocol):
    """A connection that is closed if a request's headers do not end: within a time, from when the
    connection was made or the request began, or a number of bytes. uvicorn would keep all of them.

    An offer to speak another protocol is not taken (Java's client offers HTTP/2). httptools would
    drop the body behind such headers, so it does not see the offer, unless its name comes in two
    packets.
    """

    _timer: asyncio.TimerHandle | None = None
    _num_bytes = 0
    _is_at_headers = True

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._expect_headers()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._is_at_headers:
            headers, end, rest = data.partition(b"\r\n\r\n")
            data = _UPGRADE.sub(b"\r\nX-Upgrade:", headers) + end + rest
        super().data_received(data)
        if self._timer is not None:
            self._num_bytes += len(data)
            if self._num_bytes > MAX_HEADER_BYTES:
                self._give_up(431, f"the headers have more than {MAX_HEADER_BYTES} bytes")

    def on_message_begin(self) -> None:
        super().on_message_begin()
        if self._timer is None:  # not the first of the connection
            self._expect_headers()

    def on_headers_complete(self) -> None:
        self._stop_timer()
        self._is_at_headers = False
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        self._is_at_headers = True
        super().on_message_complete()

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
            # The request before is being answered, and nothing may be written between.
            self.cycle.keep_alive = False
            if status == 431:
                self.transport.close()
            return
        if status == 408 and not self._num_bytes:
            self.transport.close()  # opened in advance, as browsers do: an answer would be taken
            return  # for that of the next request
        answer = ApiError(status, message).response({"Connection": "close"})
        lines = [f"HTTP/1.1 {status} ".encode()]
        lines += [name + b": " + value for name, value in answer.raw_headers]
        self.transport.write(b"\r\n".join([*lines, b"", answer.body]))
        self.transport.close()
