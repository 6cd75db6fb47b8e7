"""The web page at ``/``: a chat, and the live view of the engine. Static files, no build step."""

from __future__ import annotations

from pathlib import Path

from fastapi import APIRouter, Response

from .errors import ApiError

_FOLDER = Path(__file__).parent / "page"
# This page and the trace viewer share one palette.
_PALETTE = Path(__file__).parents[1] / "viewer" / "palette.css"
_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".svg": "image/svg+xml",
}
# No external resources and no inline code: the text of an answer cannot inject a script.
CONTENT_SECURITY_POLICY = "; ".join(
    [
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "img-src 'self'",
        "connect-src 'self'",
        "base-uri 'none'",
        "form-action 'self'",
        "frame-ancestors 'none'",
    ]
)
_HEADERS = {
    "Content-Security-Policy": CONTENT_SECURITY_POLICY,
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    # Revalidate always, so that a new version loads at once; the files are small.
    "Cache-Control": "no-cache",
}


def page_router() -> APIRouter:
    """GET / and GET /page/..."""
    paths = [path for path in (*_FOLDER.iterdir(), _PALETTE) if path.suffix in _TYPES]
    files = {path.name: (path.read_bytes(), _TYPES[path.suffix]) for path in paths}

    def answer(name: str) -> Response:
        content, media_type = files[name]
        return Response(content, headers=_HEADERS, media_type=media_type)

    router = APIRouter(include_in_schema=False)

    @router.get("/")
    async def read_page() -> Response:
        return answer("index.html")

    @router.get("/page/{name}")
    async def read_file(name: str) -> Response:
        if name not in files:
            raise ApiError(404, "there is no such file")
        return answer(name)

    return router
