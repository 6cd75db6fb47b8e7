"""Limits of a request: body size, time, and disconnects of the client."""

from __future__ import annotations

import asyncio
import contextlib
import json

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from .context import ServerContext
from .errors import ApiError, stopping
from .security import is_open, route_path

MAX_HEADER_BYTES = 64 << 10
# Clients read the answer only after they sent the whole body: closing the connection earlier would
# lose the answer.
_DISCARD_S = 2.0
_WITH_BODY = frozenset(("POST", "PUT", "PATCH"))
# Larger bodies may use only half of the total limit, so that small bodies always fit.
_SMALL_BODY = 1 << 20
_FULL = "the request bodies held by the server reach their limit; try again"


class Limits:
    """A middleware that refuses requests that are too large or too slow.

    A body is read completely before the endpoint is called. Later, a timeout or a disconnect of
    the client cancels the endpoint, which aborts its requests to the engine.
    """

    def __init__(self, app: ASGIApp, context: ServerContext) -> None:
        self._app, self._context = app, context

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        context = self._context
        is_work = scope["method"] == "POST" and not is_open(route_path(scope))
        context.num_requests += is_work
        held = _HeldBytes(context)
        try:
            self._check_start(scope, is_work)
            # Open paths accept no body, because it would be buffered without a key. The bytes are
            # dropped as they arrive.
            takes_body = scope["method"] in _WITH_BODY and not is_open(route_path(scope))
            body = await self._body(scope, receive, held) if takes_body else b""
            if body is not None:
                limit_s = context.config.request_timeout_s if is_work else None
                await self._call(scope, _Client(receive, body), _Answer(send), limit_s)
        except ApiError as error:
            await error.response({"Connection": "close"})(scope, receive, send)
        finally:
            held.release()
            context.num_requests -= is_work

    def _check_start(self, scope: Scope, is_work: bool) -> None:
        if sum(len(name) + len(value) for name, value in scope["headers"]) > MAX_HEADER_BYTES:
            raise ApiError(431, f"the headers have more than {MAX_HEADER_BYTES} bytes")
        if is_work and (self._context.is_draining or self._context.engine.is_stopping):
            raise stopping()

    async def _call(
        self, scope: Scope, client: _Client, answer: _Answer, limit_s: float | None
    ) -> None:
        watch = None
        try:
            async with asyncio.timeout(limit_s) as time:
                watch = asyncio.create_task(client.watch(answer, time))
                await self._app(scope, client.receive, answer.send)
        except TimeoutError:
            if not time.expired():
                raise  # raised by the endpoint itself
            if not client.is_gone:
                message = f"the request took longer than {limit_s:g} s"
                await answer.fail(ApiError(503, message, retry_after=1))
        finally:
            if watch is not None:
                watch.cancel()

    async def _body(self, scope: Scope, receive: Receive, held: _HeldBytes) -> bytes | None:
        """A request's body; None after a disconnect.

        Args:
            held: counts the body's bytes.

        Raises:
            ApiError: the body is too large or too slow, its content type is not JSON, or other
                bodies use up the total limit.
        """
        headers = dict(scope["headers"])
        limit = self._context.config.max_body_bytes
        too_large = ApiError(413, f"the body has more than {limit} bytes")
        with contextlib.suppress(ValueError):
            if int(headers.get(b"content-length", b"0")) > limit:
                if b"expect" not in headers:
                    await _discard(receive)
                raise too_large
        limit_s = self._context.config.body_timeout_s
        parts, size = [], 0
        try:
            async with asyncio.timeout(limit_s):
                while True:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        return None
                    parts.append(message.get("body", b""))
                    size += len(parts[-1])
                    has_room = held.add(len(parts[-1]))
                    if size > limit or not has_room:
                        parts.clear()
                        held.release()
                        if message.get("more_body", False):
                            await _discard(receive)
                        raise too_large if has_room else ApiError(503, _FULL, retry_after=1)
                    if not message.get("more_body", False):
                        break
        except TimeoutError:
            raise ApiError(408, f"the body took longer than {limit_s:g} s") from None
        body = b"".join(parts)
        if body and scope["method"] == "POST":
            _check_type(headers.get(b"content-type", b"").decode("latin-1"))
        return body


class _HeldBytes:
    """The bytes of one body, counted in the total of all bodies held."""

    def __init__(self, context: ServerContext) -> None:
        self._context, self._num_bytes = context, 0

    def add(self, num_bytes: int) -> bool:
        """Count more bytes. Returns whether they fit in the limit."""
        self._num_bytes += num_bytes
        self._context.num_body_bytes += num_bytes
        most = self._context.config.max_held_bytes
        return self._context.num_body_bytes <= (
            most if self._num_bytes <= _SMALL_BODY else most // 2
        )

    def release(self) -> None:
        self._context.num_body_bytes -= self._num_bytes
        self._num_bytes = 0


async def _discard(receive: Receive) -> None:
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(_DISCARD_S):
            while (await receive()).get("more_body", False):
                pass


def _check_type(content_type: str) -> None:
    kind = content_type.partition(";")[0].strip().lower()
    if kind != "application/json" and not (
        kind.startswith("application/") and kind.endswith("+json")
    ):
        raise ApiError(415, f"Content-Type is {kind or 'missing'}: it must be application/json")


class _Client:
    """The client's side of a request: its body and its disconnect."""

    def __init__(self, receive: Receive, body: bytes) -> None:
        self._receive = receive
        self._body: bytes | None = body
        self._gone = asyncio.Event()

    @property
    def is_gone(self) -> bool:
        return self._gone.is_set()

    async def watch(self, answer: _Answer, time: asyncio.Timeout) -> None:
        """Expire ``time`` if the client disconnects before the end of the answer."""
        while (await self._receive())["type"] != "http.disconnect":
            pass
        self._gone.set()
        if not answer.has_ended:
            with contextlib.suppress(RuntimeError):  # the endpoint has just returned
                time.reschedule(0.0)

    async def receive(self) -> Message:
        if self._body is None:
            await self._gone.wait()
            return {"type": "http.disconnect"}
        body, self._body = self._body, None
        return {"type": "http.request", "body": body, "more_body": False}


class _Answer:
    """Tracks the part of an answer that was sent."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self._start: Message | None = None
        self.has_ended = False

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self._start = message
        elif message["type"] == "http.response.body":
            # Before sending: servers report a disconnect as soon as the client has everything.
            self.has_ended = not message.get("more_body", False)
        await self._send(message)

    async def fail(self, error: ApiError) -> None:
        """Send an error: as the answer if none has begun, or as the last events of a stream. In the
        middle of another answer nothing is sent; the server then closes the connection."""
        if self._start is None:
            raise error
        headers = dict(self._start.get("headers", ()))
        is_stream = headers.get(b"content-type", b"").startswith(b"text/event-stream")
        if is_stream and not self.has_ended:
            last = f"data: {json.dumps(error.body)}\n\ndata: [DONE]\n\n".encode()
            await self.send({"type": "http.response.body", "body": last})
