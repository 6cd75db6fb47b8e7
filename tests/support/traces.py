"""Traces of small runs, written by a real engine over the content runner."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

from pagespec import SamplingParams
from pagespec.engine.block_manager import BlockManager
from pagespec.engine.core import Engine
from pagespec.engine.request import Request
from pagespec.engine.scheduler import Scheduler
from pagespec.engine.segments import Segment
from spec.events import read_events
from tests.support.content_runner import TOKEN_STRIDE, ContentRunner


def write_trace(
    path: Path,
    *,
    pipeline_depth: int = 0,
    num_requests: int = 9,
    has_contents: bool = False,
) -> list[str]:
    """Run chunks, prefix hits, preemptions, evictions, a pause and an abort; return the trace's
    lines.

    Args:
        has_contents: positions 2 to 9 of each prompt are one of two contents.
    """
    scheduler = Scheduler(
        BlockManager(14, 4),
        max_num_seqs=5,
        max_num_batched_tokens=12,
        pipeline_depth=pipeline_depth,
    )
    runner = ContentRunner(
        num_blocks=14, block_size=4, vocab_size=50, pipeline_depth=pipeline_depth
    )
    engine = Engine(scheduler, runner, trace=path, takes_contents=has_contents)
    shared = [TOKEN_STRIDE * (i % 7) for i in range(8)]
    for i in range(num_requests):
        prompt = [*shared, *[TOKEN_STRIDE * (i + 1)] * (3 + 4 * (i % 4))]
        limit = len(prompt) + 6 + 3 * (i % 5)
        segments = None
        if has_contents:
            picture = Segment(8, [b"a picture", b"another"][i % 4 == 1])
            segments = [Segment(2), picture, Segment(len(prompt) - 10)]
        request = Request(
            f"request-{i}",
            prompt,
            SamplingParams(),
            max_num_tokens=limit,
            seed=i,
            segments=segments,
        )
        engine.add(request)
    for _ in range(4):
        engine.step()
    engine.pause("request-3")
    engine.abort("request-5")
    for _ in range(4):
        engine.step()
    engine.resume("request-3")
    while engine.has_work:
        engine.step()
    return path.read_text().splitlines()


def in_full(lines: Iterable[str]) -> list[str]:
    """The trace in the format of version 4, with all rows of every plan."""
    events = [event for _, event in read_events(lines)]
    for event in events:
        for row in event.get("rows", ()):
            row[3] = bool(row[3])
    return [json.dumps({**event, "version": 4}) for event in events[:1]] + [
        json.dumps(event) for event in events[1:]
    ]
