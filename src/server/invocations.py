"""``/invocations``: the path under which SageMaker calls a server."""

from __future__ import annotations

from collections.abc import Mapping

from fastapi import APIRouter, Request, Response

from .bodies import read_json, run_for_body, validated
from .chat import chat_completions
from .completions import completions
from .context import Context
from .protocol.endpoints import ChatRequest, CompletionRequest

router = APIRouter()


@router.post("/invocations", response_model=None, include_in_schema=False)
async def invocations(request: Request, context: Context) -> Response:
    """A conversation if the body has messages, else a prompt."""
    content = await request.body()
    body = await run_for_body(len(content), _read, content)
    if isinstance(body, ChatRequest):
        return await chat_completions(body, request, context)
    return await completions(body, request, context)


def _read(content: bytes) -> ChatRequest | CompletionRequest:
    """
    Raises:
        ApiError, HTTPException, RequestValidationError: it is not a body of either endpoint.
    """
    value = read_json(content)
    if isinstance(value, Mapping) and "messages" in value:
        return validated(value, ChatRequest)
    return validated(value, CompletionRequest)
