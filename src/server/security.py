"""API keys, and the paths that need no key."""

from __future__ import annotations

import hmac
from hashlib import sha256

from starlette.types import ASGIApp, Receive, Scope, Send

from .context import KEY
from .errors import ApiError

# Paths for load balancers, monitors and browsers. All other paths need a key if the server has any.
_OPEN = frozenset(
    (
        *("/", "/favicon.ico", "/openapi.json"),
        *("/health", "/ping", "/liveness", "/readiness"),
        *("/load", "/metrics", "/version", "/get_world_size"),
    )
)
# FastAPI redirects a path with a trailing slash to the path without it.
_OPEN_WITH_SLASH = frozenset(f"{path}/" for path in _OPEN if path != "/")
_UNAUTHORIZED = ApiError(401, "Unauthorized: no valid API key", code="invalid_api_key")
# The files of the page.
_OPEN_PREFIX = "/page/"


def route_path(scope: Scope) -> str:
    """The path of an endpoint, without a proxy's prefix."""
    path: str = scope["path"]
    root: str = scope.get("root_path", "")
    if root and path.startswith(root) and path[len(root) : len(root) + 1] in ("", "/"):
        return path[len(root) :]
    return path


def is_open(path: str) -> bool:
    return path in _OPEN or path in _OPEN_WITH_SLASH or path.startswith(_OPEN_PREFIX)


class ApiKeys:
    """A middleware: all paths except open ones need ``Authorization: Bearer KEY`` with one of
    ``keys``. CORS preflight requests carry no such header, and pass."""

    def __init__(self, app: ASGIApp, keys: tuple[str, ...]) -> None:
        self._app = app
        self._digests = {key: sha256(key.encode()).digest() for key in keys}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            key = self._key_of(scope)
            if key is not None:
                scope[KEY] = key
            elif scope["method"] != "OPTIONS" and not is_open(route_path(scope)):
                headers = {"WWW-Authenticate": "Bearer", "Connection": "close"}
                await _UNAUTHORIZED.response(headers)(scope, receive, send)
                return
        await self._app(scope, receive, send)

    def _key_of(self, scope: Scope) -> str | None:
        """The key of a request; None without a valid one. The comparison takes constant time: it
        compares with all keys, as digests of equal length."""
        header = next((v for name, v in scope["headers"] if name == b"authorization"), b"")
        scheme, _, given = header.partition(b" ")
        if scheme.lower() != b"bearer":
            return None
        digest = sha256(given.strip()).digest()
        found = None
        for key, expected in self._digests.items():
            if hmac.compare_digest(digest, expected):
                found = key
        return found
