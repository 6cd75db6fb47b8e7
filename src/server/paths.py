"""Which paths are open to everybody, and in every state of the server."""

from __future__ import annotations

from starlette.types import Scope

# What load balancers, monitors and browsers ask for. All others need a key if there is one: a path
# that is forgotten here is guarded.
_OPEN = frozenset(
    (
        *("/", "/favicon.ico", "/openapi.json"),
        *("/health", "/ping", "/liveness", "/readiness"),
        *("/load", "/metrics", "/version", "/get_world_size"),
    )
)
# FastAPI sends who writes one slash more to the path without it.
_OPEN_WITH_SLASH = frozenset(f"{path}/" for path in _OPEN if path != "/")
# The files of the page.
_OPEN_PREFIX = "/page/"


def route_path(scope: Scope) -> str:
    """The path by which an endpoint is found: without that of a proxy."""
    path: str = scope["path"]
    root: str = scope.get("root_path", "")
    if root and path.startswith(root) and path[len(root) : len(root) + 1] in ("", "/"):
        return path[len(root) :]
    return path


def is_open(path: str) -> bool:
    return path in _OPEN or path in _OPEN_WITH_SLASH or path.startswith(_OPEN_PREFIX)
