"""What every endpoint works with: the engine and the settings of its app."""

from __future__ import annotations

import hashlib
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated

from fastapi import Depends
from starlette.requests import HTTPConnection

from ..aio.async_llm import AsyncLLM
from .config import ServerConfig
from .sampling import SamplingDefaults

if TYPE_CHECKING:
    from starlette.types import Scope

_KEY = "pagespec.api_key"


@dataclass(eq=False, slots=True)
class ServerContext:
    """The engine and the settings of one app.

    Attributes:
        defaults: of the fields that requests leave out.
        started: seconds since 1970.
        num_requests: being answered now, requests for health and the like left out.
        num_body_bytes: of the bodies that are held now.
        is_draining: the process is about to end: what runs is answered, nothing new is taken.
    """

    engine: AsyncLLM
    config: ServerConfig
    defaults: SamplingDefaults = field(default_factory=SamplingDefaults)
    started: float = field(default_factory=time.time)
    num_requests: int = 0
    num_body_bytes: int = 0
    is_draining: bool = False

    @property
    def model_names(self) -> tuple[str, ...]:
        return self.config.names

    @property
    def is_ready(self) -> bool:
        """Whether new requests are taken."""
        return not (self.is_draining or self.engine.is_stopping) and self.engine.failure is None


def context_of(request: HTTPConnection) -> ServerContext:
    """A dependency: the context of the app that serves a request."""
    context: ServerContext = request.app.state.context
    return context


Context = Annotated[ServerContext, Depends(context_of)]


def request_id_of(request: HTTPConnection) -> str:
    """What the header X-Request-Id of a request says, or the id it was given."""
    request_id: str = request.scope["pagespec.request_id"]
    return request_id


def salt_of(request: HTTPConnection, own: str | None = None) -> str | None:
    """The ``cache_salt`` of a request.

    With ``salt_per_key`` it is made of the API key and of ``own``, what the request itself says:
    so no request can name the salt of another key.
    """
    key: str | None = request.scope.get(_KEY)
    if key is None or not context_of(request).config.salt_per_key:
        return own
    digest = hashlib.sha256(key.encode()).hexdigest()
    return f"{digest}:{own or ''}"


def owner_of(request: HTTPConnection, user: str | None, context: ServerContext) -> str:
    """On whose share a request is served under the policy "fair": a digest of the API key where the
    server has several, else of the field ``user``. So no key gets a larger share by naming users,
    and one key that many users share (a gateway's) is shared out among them."""
    key: str | None = request.scope.get(_KEY)
    has_several = len(context.config.api_keys) > 1
    name = f"key:{key}" if key is not None and has_several else f"user:{user or ''}"
    return hashlib.sha256(name.encode(errors="surrogatepass")).hexdigest()[:32]


def note_key(scope: Scope, key: str) -> None:
    """Remember which API key a request brought, for :func:`salt_of` and :func:`owner_of`."""
    scope[_KEY] = key
