"""Endpoints for operators and trainers: pause, resume, reset. Need ``enable_admin``."""

from __future__ import annotations

from enum import StrEnum

from fastapi import APIRouter

from ..errors import EngineStoppedError, InvalidInputError
from .context import Context
from .errors import ApiError

router = APIRouter()


class PauseMode(StrEnum):
    """The modes of ``AsyncLLM.pause_generation``."""

    ABORT = "abort"
    WAIT = "wait"
    KEEP = "keep"


@router.post("/pause")
async def pause(
    context: Context, mode: PauseMode = PauseMode.ABORT, clear_cache: bool = True
) -> dict[str, str]:
    """Stop computing. New requests wait until ``/resume``.

    ``mode``: "abort" ends running requests with finish reason "abort", "wait" completes them first,
    "keep" continues them later. ``clear_cache`` empties the prefix cache, unless requests are kept.
    """
    try:
        await context.engine.pause_generation(mode.value)
    except EngineStoppedError as error:
        if context.engine.is_stopping:
            raise
        raise ApiError(409, str(error)) from None
    if clear_cache and mode is not PauseMode.KEEP:
        await context.engine.reset_prefix_cache()
    return {"status": "paused"}


@router.post("/resume")
async def resume(context: Context) -> dict[str, str]:
    """Continue after ``/pause``."""
    await context.engine.resume_generation()
    return {"status": "resumed"}


@router.get("/is_paused")
async def is_paused(context: Context) -> dict[str, bool]:
    return {"is_paused": await context.engine.is_paused()}


@router.post("/reset_prefix_cache")
async def reset_prefix_cache(
    context: Context, reset_running_requests: bool = True, reset_external: bool = False
) -> dict[str, bool]:
    """Empty the prefix cache. The answer is ``{"success": true}`` if it was emptied.

    ``reset_running_requests``: preempt live requests; if false, nothing happens while requests are
    live. ``reset_external``: must be false.
    """
    if reset_external:
        raise InvalidInputError("reset_external", True, "must be false: there is no other cache")
    return {"success": await context.engine.reset_prefix_cache(reset_running_requests)}
