"""Data of the live view: the engine's present state, and its speed over the last minute."""

from __future__ import annotations

import json
import time
from collections import deque
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import anyio
from fastapi import APIRouter
from sse_starlette import EventSourceResponse

from ..engine.histograms import Histogram, quantile
from .context import Context, ServerContext
from .metrics import EngineMetrics

PERIOD_S = 0.5
WINDOW_S = 60.0
# Time window for tokens and steps per second.
RATE_S = 5.0
MAX_CELLS = 2048
# Maximum number of blocks read for a map; a large pool has hundreds of thousands.
_MAX_BLOCKS_READ = 4 * MAX_CELLS


@dataclass(frozen=True, slots=True)
class _Mark:
    """The counters at one time, unchanged since ``unchanged_since``."""

    time: float
    unchanged_since: float
    first_token: list[int]
    between_tokens: list[int]
    num_prompt_tokens: int
    num_generated_tokens: int
    num_steps: int
    num_step_tokens: float


class LiveView:
    """Keeps the counters of the last 60 seconds, with one mark per second that has a step."""

    def __init__(self, metrics: EngineMetrics) -> None:
        self._metrics, self._engine = metrics, metrics.engine
        self._stepped_at = time.monotonic()
        self._marks = deque([self._mark()], maxlen=int(WINDOW_S) + 2)
        self._frame: dict[str, Any] = {}
        self._frame_at = float("-inf")
        metrics.step_observers.append(self.on_step)

    def on_step(self) -> None:
        """Called on the engine's thread."""
        now = time.monotonic()
        if now - self._marks[-1].time >= 1.0:
            self._marks.append(self._mark())
        self._stepped_at = now

    async def frame(self, context: ServerContext) -> dict[str, Any]:
        """All values of the view; cached for half a period."""
        now = time.monotonic()
        if now - self._frame_at > PERIOD_S / 2:
            state = await _state(context)
            self._frame, self._frame_at = self._make_frame(context, state), now
        return self._frame

    def _mark(self) -> _Mark:
        metrics = self._metrics
        return _Mark(
            time.monotonic(),
            self._stepped_at,
            metrics.first_token_s.counts.copy(),
            metrics.between_tokens_s.counts.copy(),
            metrics.num_prompt_tokens,
            metrics.num_generated_tokens,
            sum(metrics.step_tokens.counts),
            metrics.step_tokens.total,
        )

    def _since(self, now: _Mark, seconds: float) -> _Mark:
        """The counters ``seconds`` ago, or the first ones."""
        begin = now.time - seconds
        marks = [*self._marks, now]
        return next((m for m in reversed(marks) if m.unchanged_since <= begin), marks[0])

    def _make_frame(self, context: ServerContext, state: str) -> dict[str, Any]:
        engine, metrics = self._engine, self._metrics
        snapshot, now = engine.snapshot(), self._mark()
        recent, minute = self._since(now, RATE_S), self._since(now, WINDOW_S)
        elapsed = now.time - recent.time
        if recent.unchanged_since <= now.time - RATE_S:
            elapsed = max(elapsed, RATE_S)
        elapsed = max(elapsed, 1e-3)
        num_steps = now.num_steps - recent.num_steps
        num_step_tokens = now.num_step_tokens - recent.num_step_tokens
        queried = snapshot.num_queried_tokens
        return {
            "model": {
                "name": context.model_names[0],
                "max_model_len": engine.llm.max_model_len,
                "has_chat_template": engine.llm.chat_reader.has_template,
            },
            "state": state,
            "uptime_s": time.time() - context.started,
            "requests": {
                "running": snapshot.num_running,
                "waiting": snapshot.num_waiting,
                "paused": snapshot.num_paused,
                "ended": dict(metrics.num_ended),
                "limit": engine.max_num_requests,
            },
            "blocks": {
                "total": snapshot.num_blocks,
                "size": engine.llm.config.block_size,
                "owned": snapshot.num_owned_blocks,
                "cached": snapshot.num_cached_blocks,
                "free": max(
                    0, snapshot.num_blocks - snapshot.num_owned_blocks - snapshot.num_cached_blocks
                ),
                "map": self._map(snapshot.num_blocks),
            },
            "tokens": {
                "prompt": now.num_prompt_tokens,
                "generated": now.num_generated_tokens,
                "prompt_per_s": (now.num_prompt_tokens - recent.num_prompt_tokens) / elapsed,
                "generated_per_s": (now.num_generated_tokens - recent.num_generated_tokens)
                / elapsed,
            },
            "steps": {
                "total": snapshot.num_steps,
                "per_s": num_steps / elapsed,
                "mean_tokens": num_step_tokens / num_steps if num_steps else 0.0,
                "max_requests": engine.llm.config.max_num_seqs,
            },
            "first_token_s": _quantiles(metrics.first_token_s, now.first_token, minute.first_token),
            "between_tokens_s": _quantiles(
                metrics.between_tokens_s, now.between_tokens, minute.between_tokens
            ),
            "prefix_cache": {
                "queried": queried,
                "hits": snapshot.num_hit_tokens,
                "hit_rate": snapshot.num_hit_tokens / queried if queried else 0.0,
            },
            "preemptions": snapshot.num_preemptions,
        }

    def _map(self, num_blocks: int) -> dict[str, Any]:
        """One digit per cell, 0 to 9: the share of owned blocks, and of cached blocks."""
        every = -(-num_blocks // _MAX_BLOCKS_READ)
        states = self._engine.block_map(every)
        size = -(-len(states) // MAX_CELLS)
        cells = [states[begin : begin + size] for begin in range(0, len(states), size)]
        return {
            "blocks_per_cell": size * every,
            "owned": "".join(_digit(cell.count(2), len(cell)) for cell in cells),
            "cached": "".join(_digit(cell.count(1), len(cell)) for cell in cells),
        }


def _digit(count: int, of: int) -> str:
    """A digit that is 0 only for a count of 0."""
    return str(-(-9 * count // of))


def _quantiles(histogram: Histogram, now: list[int], before: list[int]) -> dict[str, Any]:
    counts = [new - old for new, old in zip(now, before, strict=True)]
    return {
        "count": sum(counts),
        "p50": quantile(histogram.uppers, counts, 0.50),
        "p99": quantile(histogram.uppers, counts, 0.99),
    }


async def _state(context: ServerContext) -> str:
    engine = context.engine
    if engine.failure is not None:
        return "failed"
    if context.is_draining or engine.is_stopping:
        return "stopping"
    return "paused" if await engine.is_paused() else "ready"


def live_router(view: LiveView) -> APIRouter:
    """GET /live, and GET /live/stream: the same every half second, as server-sent events."""
    router = APIRouter()

    # Both are async, because the counters change on the event loop.
    @router.get("/live", summary="State and speed of the engine")
    async def read_live(context: Context) -> dict[str, Any]:
        return await view.frame(context)

    @router.get("/live/stream", summary="State and speed of the engine, every 0.5 s")
    async def stream_live(context: Context) -> EventSourceResponse:
        return EventSourceResponse(_events(view, context), headers={"Cache-Control": "no-store"})

    return router


async def _events(view: LiveView, context: ServerContext) -> AsyncIterator[dict[str, str]]:
    while True:
        yield {"data": json.dumps(await view.frame(context), separators=(",", ":"))}
        if context.is_draining or context.engine.is_stopping:
            return  # a server that stops waits for its connections
        await anyio.sleep(PERIOD_S)
