"""State shared by all endpoints: the engine and the settings of the app."""

from __future__ import annotations

import hashlib
import time
from dataclasses import dataclass, field
from typing import Annotated

from fastapi import Depends
from starlette.requests import HTTPConnection

from ..serving.async_llm import AsyncLLM
from .config import ServerConfig
from .sampling import SamplingDefaults

KEY = "pagespec.api_key"
"""Key in a request's scope for its API key; used by :func:`salt_of` and :func:`owner_of`."""


@dataclass(eq=False, slots=True)
class ServerContext:
    """The engine and the settings of one app.

    Attributes:
        defaults: sampling defaults for fields that a request omits.
        started: start time, in seconds since 1970.
        num_requests: requests in progress, without those to open paths.
        num_body_bytes: total size of all bodies held now.
        is_draining: the process is shutting down: running requests finish, new ones are refused.
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
        """Whether new requests are accepted."""
        return not (self.is_draining or self.engine.is_stopping) and self.engine.failure is None


def context_of(request: HTTPConnection) -> ServerContext:
    """A dependency: the context of the app that serves a request."""
    context: ServerContext = request.app.state.context
    return context


Context = Annotated[ServerContext, Depends(context_of)]


def request_id_of(request: HTTPConnection) -> str:
    """The header X-Request-Id of a request, or its generated id."""
    request_id: str = request.scope["pagespec.request_id"]
    return request_id


def salt_of(request: HTTPConnection, own: str | None = None) -> str | None:
    """The ``cache_salt`` of a request.

    With ``salt_per_key`` it is derived from the API key and from ``own``, the salt in the body. So
    a request cannot use the salt of another key.
    """
    key: str | None = request.scope.get(KEY)
    if key is None or not context_of(request).config.salt_per_key:
        return own
    digest = hashlib.sha256(key.encode()).hexdigest()
    return f"{digest}:{own or ''}"


def owner_of(request: HTTPConnection, user: str | None, context: ServerContext) -> str:
    """The owner of a request under the policy "fair": a digest of the API key if the server has
    several keys, otherwise the field ``user``. With several keys, naming users gives a key no
    larger share; with one key (a gateway's), each user has a share."""
    key: str | None = request.scope.get(KEY)
    has_several = len(context.config.api_keys) > 1
    name = f"key:{key}" if key is not None and has_several else f"user:{user or ''}"
    return hashlib.sha256(name.encode(errors="surrogatepass")).hexdigest()[:32]
