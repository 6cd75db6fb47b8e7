"""Parses the lines of a step trace, and checks the shape of each before it is used.

``pagespec.engine.trace`` describes the format. If a field is missing, has another type or is
outside its bounds, the file is not a trace; ``replay`` decides whether the specification allows a
well-formed event.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from .state import REFUSALS

VERSIONS = (1, 2, 3, 4, 5, 6, 7, 8, 9, 10)
_MAX_BLOCKS = 1 << 26  # beyond any device's memory; the machine stores some words per block
_MAX_BLOCK_SIZE = 1 << 20
_MAX_SECONDS = 1 << 40
_HASH = re.compile("(?:[0-9a-f]{2})+")

Shape = Callable[[Any], bool]
Rows = list[list[Any]]


class TraceError(ValueError):
    """The file is not a step trace, or has an unsupported version."""


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _is_flag(value: Any) -> bool:
    return isinstance(value, bool)


def _is_integer(value: Any) -> bool:
    return type(value) is int  # excludes true and false


def _is_policy(value: Any) -> bool:
    return value in ("fcfs", "fair", "shortest_first", "priority")


def _is_reason(value: Any) -> bool:
    return value in REFUSALS and value != "behind"  # requests behind a refused one are not traced


def _is_time(value: Any) -> bool:
    return type(value) in (int, float) and 0 <= value < _MAX_SECONDS


def _are_times(value: Any) -> bool:
    """Three readings of one clock, in seconds."""
    return _tuple_of(_is_time, _is_time, _is_time)(value) and value == sorted(value)


def _is_content_hash(value: Any) -> bool:
    """None for a token segment."""
    return value is None or (_is_text(value) and _HASH.fullmatch(value) is not None)


def _between(low: int, high: int | None = None) -> Shape:
    return lambda value: _is_integer(value) and low <= value and (high is None or value <= high)


def _list_of(shape: Shape, *, at_least: int = 0) -> Shape:
    return lambda value: (
        isinstance(value, list) and len(value) >= at_least and all(map(shape, value))
    )


def _tuple_of(*shapes: Shape) -> Shape:
    return lambda value: (
        isinstance(value, list)
        and len(value) == len(shapes)
        and all(shape(item) for shape, item in zip(shapes, value, strict=True))
    )


def _columns_of(sampled: Shape) -> Shape:
    """Rows as traced since version 5; null stands for those of the previous plan. ``sampled``: the
    shape of the number of samples of an unusual row."""
    return lambda value: (
        value is None
        or (
            isinstance(value, dict)
            and _list_of(_is_text)(value.get("ids"))
            and _list_of(_is_count)(value.get("starts"))
            and _list_of(_tuple_of(_is_count, _is_count, sampled))(value.get("unusual"))
            and len(value["ids"]) == len(value["starts"])
            and all(row < len(value["ids"]) for row, _, _ in value["unusual"])
        )
    )


_is_count = _between(0)
_POOL = _tuple_of(_is_count, _is_count, _is_count)
_TABLES = _list_of(_tuple_of(_is_text, _list_of(_is_count)))
_STATE_TABLES = _list_of(_tuple_of(_is_text, _list_of(_between(-1))))
_EVENTS: dict[str, dict[str, Shape]] = {
    "start": {
        "num_blocks": _between(1, _MAX_BLOCKS),
        "block_size": _between(1, _MAX_BLOCK_SIZE),
        "enable_prefix_caching": _is_flag,
        "max_num_seqs": _between(1),
        "max_num_batched_tokens": _between(1),
        "pipeline_depth": _is_count,
        "policy": _is_policy,
        "max_overtakes": _is_count,
        "tokens_per_arrival": _between(1),
        "arrivals_per_priority": _is_count,
        "num_state_slots": _between(0, _MAX_BLOCKS),
        "state_interval": _is_count,
        "credit": _is_count,
        "ticks_per_token": _between(1),
        "reply_tokens": _is_count,
        "max_draft_tokens": _is_count,
        "max_wanted_drafts": _is_count,
    },
    "add": {
        "id": _is_text,
        "prompt": _list_of(_is_count, at_least=1),
        "max_num_tokens": _is_count,
        "stop_token_ids": _list_of(_is_integer),
        "has_stop_strings": _is_flag,
        "salt": _is_text,
        "priority": _is_integer,
        "owner": _is_count,
        "reads_cache": _is_flag,
        "needs_history": _is_flag,
        "settled_only": _is_flag,
        "siblings": _list_of(_is_text),
        "segments": _list_of(_tuple_of(_between(1), _is_content_hash), at_least=1),
    },
    "plan": {
        "step": _is_count,
        "budget": _between(1),
        "rows": _list_of(_tuple_of(_is_text, _is_count, _is_count, _is_flag)),
        "preempted": _list_of(_is_text),
        "tables": _TABLES,
        "new_blocks": _TABLES,
        "released": _list_of(_is_text),
        "prefixes": _TABLES,
        "copies": _list_of(_tuple_of(_is_count, _is_count)),
        "drafts": _list_of(_tuple_of(_is_text, _list_of(_is_count, at_least=1))),
        "wanted": _list_of(_tuple_of(_is_text, _between(1))),
        "askers": _list_of(_is_text),
        "hits": _list_of(_tuple_of(_is_text, _is_count)),
        "evicted": _is_count,
        "refused": _list_of(_tuple_of(_is_text, _is_reason)),
        "times": _are_times,
        "pool": _POOL,
        "state_tables": _STATE_TABLES,
        "new_state_slots": _TABLES,
        "state_pool": _POOL,
    },
    "result": {
        "step": _is_count,
        "token_ids": _list_of(_is_count),
        "accepted": _list_of(_tuple_of(_is_text, _is_count)),
        "finished": _list_of(_tuple_of(_is_text, _is_text)),
        "times": _are_times,
        "pool": _POOL,
        "state_pool": _POOL,
    },
    "abort": {"id": _is_text},
    "pause": {"id": _is_text},
    "resume": {"id": _is_text},
    "reset": {"pool": _POOL, "state_pool": _POOL},
    "fail": {"pool": _POOL, "state_pool": _POOL},
}

# Fields and the trace version that introduced them.
_SINCE = {
    **{("plan", field): 2 for field in ("tables", "new_blocks", "released")},
    **{("add", field): 3 for field in ("reads_cache", "needs_history", "siblings")},
    **{("plan", field): 3 for field in ("prefixes", "copies")},
    **{("plan", field): 4 for field in ("askers", "hits", "evicted", "refused", "times")},
    ("result", "times"): 4,
    ("add", "settled_only"): 5,
    ("start", "num_state_slots"): 6,
    ("start", "state_interval"): 6,
    **{("start", field): 7 for field in ("credit", "ticks_per_token", "reply_tokens")},
    ("add", "owner"): 7,
    ("plan", "budget"): 7,
    ("start", "max_draft_tokens"): 8,
    ("plan", "drafts"): 8,
    ("start", "max_wanted_drafts"): 10,
    ("plan", "wanted"): 10,
    ("result", "accepted"): 8,
    ("add", "segments"): 9,
}
# Fields of an engine with state slots.
_OF_STATES = ("state_tables", "new_state_slots", "state_pool")
_COLUMNS_SINCE = 5
_SAMPLES_SINCE = 8  # version: a row has the number of samples, not whether it samples


def read_events(lines: Iterable[str]) -> Iterator[tuple[int, dict[str, Any]]]:
    """Each event with its line number, from 1. The first event is a start, and no other is. A plan
    has all its rows, ``[id, start, num_tokens, num_samples]``, independent of its version's format.

    Raises:
        TraceError: a line is not an event of a step trace.
    """
    number = version = 0
    has_states = False
    rows: Rows | None = None  # of the previous plan, since the last failure
    for number, line in enumerate(lines, 1):
        event = _parsed(line, number)
        is_start = event.get("event") == "start"
        if number == 1:
            version = event.get("version", 0)
            if not is_start or not _is_integer(version) or version not in VERSIONS:
                raise TraceError(f"not a step trace of version {VERSIONS[0]} to {VERSIONS[-1]}")
        if number > 1 and is_start:
            raise TraceError(f"line {number} starts another trace")
        _check_shape(event, number, version, has_states)
        if is_start and version >= 6:
            has_states = _has_states(event)
        if event["event"] == "plan":
            if version >= _COLUMNS_SINCE:
                event["rows"] = _all_rows(event["rows"], rows, number)
            for row in event["rows"]:
                row[3] = int(row[3])
            rows = event["rows"]
        elif event["event"] == "fail":
            rows = None
        yield number, event
    if number == 0:
        raise TraceError("the trace is empty")


def _has_states(start: dict[str, Any]) -> bool:
    num_slots, interval = start["num_state_slots"], start["state_interval"]
    if num_slots and (num_slots <= start["max_num_seqs"] or not interval):
        raise TraceError(f"line 1: {num_slots} state slots for intervals of {interval} tokens")
    if num_slots and interval % start["block_size"]:
        raise TraceError(f"line 1: intervals of {interval} tokens are not whole blocks")
    return num_slots > 0


def _all_rows(recorded: dict[str, Any] | None, before: Rows | None, number: int) -> Rows:
    if recorded is None:
        if before is None:
            raise TraceError(f"line {number}: refers to the rows of a missing previous plan")
        return [[name, start + num_tokens, 1, 1] for name, start, num_tokens, _ in before]
    rows: Rows = [[*row, 1, 1] for row in zip(recorded["ids"], recorded["starts"], strict=True)]
    for row, num_tokens, num_samples in recorded["unusual"]:
        rows[row][2:] = num_tokens, num_samples
    return rows


def _parsed(line: str, number: int) -> dict[str, Any]:
    try:
        event = json.loads(line)
    # Besides bad syntax: an integer with too many digits, and lists nested too deep.
    except (ValueError, RecursionError) as error:
        raise TraceError(f"line {number} is not JSON: {error}") from error
    if not isinstance(event, dict):
        raise TraceError(f"line {number} is not an event")
    return event


def _check_shape(event: dict[str, Any], number: int, version: int, has_states: bool) -> None:
    name = event.get("event")
    fields = _EVENTS.get(name) if isinstance(name, str) else None
    if fields is None:
        raise TraceError(f"line {number}: unknown event {shortened(repr(name), 80)}")
    for field, shape in {"t": _is_time, **fields}.items():
        if version < _SINCE.get((name, field), 0) or (field in _OF_STATES and not has_states):
            continue
        if field not in event:
            raise TraceError(f"line {number}: {name} has no {field!r}")
        if (name, field) == ("plan", "rows") and version >= _COLUMNS_SINCE:
            shape = _columns_of(_is_count if version >= _SAMPLES_SINCE else _is_flag)
        if not shape(event[field]):
            value = shortened(repr(event[field]), 80)
            raise TraceError(f"line {number}: {name} has {field} = {value}")


def shortened(text: str, length: int) -> str:
    """A text cut to at most ``length`` characters; a cut text ends with three dots."""
    return text if len(text) <= length else text[: length - 3] + "..."
