"""The outermost middleware (request ids, access log, unhandled exceptions), and log formats."""

from __future__ import annotations

import asyncio
import json
import logging
import re
import time
import uuid
from contextvars import ContextVar

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from .errors import api_error
from .metrics import HttpRequestCounts

current_request_id: ContextVar[str | None] = ContextVar("request_id", default=None)

# Optional attributes of an access log record.
_FIELDS = ("request_id", "client", "method", "path", "status", "seconds")


class JsonFormatter(logging.Formatter):
    """Formats a record as one line of JSON."""

    def format(self, record: logging.LogRecord) -> str:
        moment = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        line = {
            "time": f"{moment}.{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **{name: getattr(record, name) for name in _FIELDS if hasattr(record, name)},
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line)


class RequestIds(logging.Filter):
    """Sets ``request_id`` of each record, and ``request``, its form in a text line."""

    def filter(self, record: logging.LogRecord) -> bool:
        request_id = getattr(record, "request_id", None) or current_request_id.get()
        if request_id is not None:
            record.request_id = request_id
        record.request = "" if request_id is None else f"[{request_id}] "
        return True


def set_up_logs(as_json: bool) -> None:
    """Log to stderr: messages of pagespec, libraries and, as JSON, the ``warnings`` module."""
    line = logging.Formatter("%(asctime)s %(request)s%(message)s")
    handler = logging.StreamHandler()
    handler.setFormatter(JsonFormatter() if as_json else line)
    handler.addFilter(RequestIds())
    root = logging.getLogger()
    root.handlers = [handler]
    root.setLevel(logging.WARNING)
    logging.getLogger("pagespec").setLevel(logging.INFO)
    logging.captureWarnings(as_json)


access_logger = logging.getLogger("pagespec.access")
_ACCESS = "%(client)s %(method)s %(path)s %(status)s %(seconds).3f s"

# Client-supplied ids that are valid in a header and in a log line.
_ID = re.compile(rb"[\x21-\x7e]{1,128}")


class Requests:
    """The outermost middleware.

    A request's id is its header X-Request-Id, or a new one. The answer and every log line of the
    request contain the id. HEAD is handled as GET without the body. An unhandled exception becomes
    a response with status 500 and a log line. Endpoints answer with the prefix ``root_path`` and
    without it. ``counts`` gets each request.
    """

    def __init__(
        self, app: ASGIApp, counts: HttpRequestCounts, log: bool, root_path: str = ""
    ) -> None:
        self._app, self._log = app, log
        self._root_path = root_path.rstrip("/")
        self._counts = counts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request_id = _request_id(scope)
        scope["pagespec.request_id"] = request_id
        if self._root_path:
            scope["root_path"] = self._root_path
        status = 0
        began = time.perf_counter()

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                headers = [*message.get("headers", ()), (b"x-request-id", request_id.encode())]
                message = {**message, "headers": headers}
            await send(message)

        call = (scope, receive, send_with_id)
        if scope["method"] == "HEAD":
            head = _Head(receive, send_with_id)
            call = ({**scope, "method": "GET"}, head.receive, head.send)
        token = current_request_id.set(request_id)
        try:
            await self._app(*call)
        except Exception as error:
            refusal = api_error(error)
            if not status:
                await refusal.response({"Connection": "close"})(scope, receive, send_with_id)
        finally:
            self._counts.add(scope["method"], call[0].get("route"), status)
            if self._log:
                # Without the query string, which may contain private values.
                fields = {
                    "request_id": request_id,
                    "client": "{}:{}".format(*scope["client"]) if scope.get("client") else "-",
                    "method": scope["method"],
                    "path": scope["path"],
                    "status": status or None,
                    "seconds": round(time.perf_counter() - began, 6),
                }
                shown = {**fields, "path": _printable(scope["path"]), "status": status or "gone"}
                access_logger.info(_ACCESS, shown, extra=fields)
            current_request_id.reset(token)


class _Head:
    """A connection that sends only the headers of an answer, then reports a disconnect, which ends
    streams."""

    def __init__(self, receive: Receive, send: Send) -> None:
        self._receive, self._send = receive, send
        self._is_read = False
        self._has_begun = asyncio.Event()

    async def receive(self) -> Message:
        if not self._is_read:
            message = await self._receive()
            self._is_read = not message.get("more_body", False)
            return message
        await self._has_begun.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            await self._send(message)
            await self._send({"type": "http.response.body", "body": b""})
            self._has_begun.set()


def _request_id(scope: Scope) -> str:
    given = next((v for name, v in scope["headers"] if name == b"x-request-id"), b"")
    return given.decode() if _ID.fullmatch(given) else uuid.uuid4().hex


def _printable(path: str) -> str:
    """A path without line breaks for the log."""
    return path if path.isprintable() else ascii(path)[1:-1]
