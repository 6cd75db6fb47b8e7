"""Puts a timeline, the page's style and its scripts into one HTML file that needs no network."""

from __future__ import annotations

import base64
import json
import zlib
from importlib.resources import files
from typing import Any, NamedTuple

from .timeline import KINDS, Timeline

_STYLES = ("palette.css", "page.css")
_OF_LANES = ("name", "contents", "priority", "owner", "added", "ended", "reason")
_SCRIPTS = ("trace_data.js", "view.js", "lanes.js", "tracks.js", "inspect.js", "main.js")


class Verdict(NamedTuple):
    """The result of ``trace check``. ``line``: 0 if accepted; ``text``: shown on the page."""

    line: int
    property_id: str
    text: str


def _columns(timeline: Timeline, title: str, verdict: Verdict | None) -> dict[str, Any]:
    segments = [(n, *s) for n, lane in enumerate(timeline.lanes) for s in lane.segments]
    fields = (
        *("lane", "kind", "step", "numSteps", "start", "numTokens", "numSamples"),
        *("begin", "end"),
    )
    columns = list(zip(*segments, strict=True)) or [()] * len(fields)
    violation = None
    if verdict is not None and verdict.line:
        when, step = timeline.lines.get(verdict.line, (timeline.end, len(timeline.numbers) - 1))
        violation = {"time": when, "step": max(step, 0), "text": verdict.text}
        violation["property"] = verdict.property_id
    return {
        "title": title,
        "settings": timeline.settings,
        "kinds": KINDS,
        "end": timeline.end,
        "verdict": None if verdict is None else verdict.text,
        "violation": violation,
        "lanes": {
            "numPrompt": [lane.num_prompt for lane in timeline.lanes],
            **{name: [getattr(lane, name) for lane in timeline.lanes] for name in _OF_LANES},
        },
        "steps": {"number": timeline.numbers, **timeline.times, **timeline.counts},
        "segments": {name: list(map(int, c)) for name, c in zip(fields, columns, strict=True)},
        "hits": timeline.hits,
        "drafts": timeline.drafts,
        "preemptions": timeline.preemptions,
        "refusals": timeline.refusals,
        "marks": timeline.marks,
    }


def _read(name: str) -> str:
    return files(__package__).joinpath(name).read_text(encoding="utf-8")


def make_page(timeline: Timeline, title: str, verdict: Verdict | None) -> str:
    """The page's text; ``verdict`` is None for an unchecked trace."""
    data = json.dumps(_columns(timeline, title, verdict), separators=(",", ":")).encode()
    packed = base64.b64encode(zlib.compress(data, 6)).decode()
    parts = {
        "/* styles */": "\n".join(map(_read, _STYLES)),
        "/* scripts */": "\n".join(map(_read, _SCRIPTS)),
        "packed-trace": packed,
    }
    page = _read("page.html")
    for place, text in parts.items():
        page = page.replace(place, text)
    return page
