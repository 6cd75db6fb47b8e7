"""Endpoints about the server itself: models, health, version."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Response

from .. import __version__
from .context import Context, ServerContext
from .errors import ApiError

router = APIRouter()


@router.get("/v1/models")
async def models(context: Context) -> dict[str, Any]:
    """The model, under each of its names."""
    return {"object": "list", "data": [_card(context, name) for name in context.model_names]}


@router.get("/v1/models/{name:path}")
async def model(name: str, context: Context) -> dict[str, Any]:
    """The model under one name; with a trailing slash only, under all names."""
    if not name:
        return await models(context)
    check_model(context, name)
    return _card(context, name)


def check_model(context: ServerContext, name: str | None) -> str:
    """The model name for an answer to a request for ``name``; None: the first name.

    Raises:
        ApiError: the model has no such name.
    """
    if name is None or name == "":
        return context.model_names[0]
    if name not in context.model_names:
        message = f"The model `{name}` does not exist."
        raise ApiError(404, message, param="model")
    return name


def _card(context: ServerContext, name: str) -> dict[str, Any]:
    return {
        "id": name,
        "object": "model",
        "created": int(context.started),
        "owned_by": "pagespec",
        "root": context.config.root,
        "parent": None,
        "max_model_len": context.engine.llm.max_model_len,
    }


@router.get("/health")
@router.get("/readiness")
@router.api_route("/ping", methods=["GET", "POST"], include_in_schema=False)
async def health(context: Context) -> Response:
    """200 if new requests are accepted, else 503. The body is empty."""
    return Response(status_code=200 if context.is_ready else 503)


@router.get("/liveness")
async def liveness() -> Response:
    """200 while the process responds at all, even if it drains or the engine has failed."""
    return Response(status_code=200)


@router.get("/load")
async def load(context: Context) -> dict[str, int]:
    """The number of requests in progress."""
    return {"server_load": context.num_requests}


@router.get("/version")
async def version() -> dict[str, str]:
    return {"version": __version__}


@router.get("/get_world_size")
async def world_size(context: Context) -> dict[str, int]:
    """The number of processes that share the model."""
    return {"world_size": context.engine.llm.config.tensor_parallel_size}
