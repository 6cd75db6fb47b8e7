"""Parse the chunks of a stream strictly and assemble them as a client does."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

_APPENDED = ("text", "token_ids")


def read_events(body: str) -> list[dict[str, Any]]:
    """The chunks of a whole stream, which must be well formed to the last byte."""
    assert body.endswith("data: [DONE]\n\n")
    events = body.split("\n\n")[:-2]
    assert all(event.startswith("data: {") and "\n" not in event for event in events)
    return [json.loads(event.removeprefix("data: ")) for event in events]


def joined_answer(chunks: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """The chunks joined to the form of an unstreamed answer."""
    answer: dict[str, Any] = {}
    choices: dict[int, dict[str, Any]] = {}
    for chunk in chunks:
        for key, value in chunk.items():
            if key == "choices":
                for choice in value:
                    assert choices.get(choice["index"], {}).get("finish_reason") is None
                    _extend(choices.setdefault(choice["index"], {}), choice)
            elif value is not None or key not in answer:
                assert key in ("object", "usage") or answer.get(key, value) == value
                answer[key] = value
    return {**answer, "choices": [choices[index] for index in sorted(choices)]}


def _extend(choice: dict[str, Any], piece: dict[str, Any]) -> None:
    for key, value in piece.items():
        if key == "delta":
            _extend_message(choice.setdefault("message", {}), value)
        elif key == "logprobs" and value is not None:
            so_far = choice.get("logprobs") or {name: [] for name in value}
            choice["logprobs"] = {name: so_far[name] + more for name, more in value.items()}
        elif key in _APPENDED and value is not None:
            choice[key] = (choice.get(key) or type(value)()) + value
        elif value is not None or key not in choice:
            choice[key] = value


def _extend_message(message: dict[str, Any], delta: dict[str, Any]) -> None:
    for key, value in delta.items():
        if key == "role":
            assert not message
            message[key] = value
        elif key == "tool_calls":
            for call in value:
                calls = message.setdefault(key, [])
                assert call["index"] == len(calls)
                calls.append({name: part for name, part in call.items() if name != "index"})
        else:
            message[key] = message.get(key, "") + value


def plain_message(message: dict[str, Any]) -> dict[str, Any]:
    """A message without null or empty fields, which streams leave out."""
    return {key: value for key, value in message.items() if value}


def alike(answer: dict[str, Any]) -> dict[str, Any]:
    """An answer without the fields that differ between two equal requests."""
    dropped = ("id", "request_id", "created", "object")
    kept = {key: value for key, value in answer.items() if key not in dropped and value is not None}
    if "usage" in kept:
        # The number of cached tokens depends on earlier requests.
        del kept["usage"]["prompt_tokens_details"]
    kept["choices"] = [
        {key: value for key, value in choice.items() if value is not None}
        for choice in kept["choices"]
    ]
    for choice in kept["choices"]:
        if "message" in choice:
            choice["message"] = plain_message(choice["message"])
            for call in choice["message"].get("tool_calls", ()):
                del call["id"]
    return kept
