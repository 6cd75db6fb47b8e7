"""Answers that must be tool calls: what they are held to, and how they are read."""

from __future__ import annotations

import json
from typing import Any

import pytest

from pagespec import InvalidInputError, SamplingParams
from pagespec.chat.response import read_response
from pagespec.chat.tool_choice import forced_output
from tests.support.chat_models import WEATHER, chat_tokenizer, ids_of, make_reader, prompt_of

NOW = {"type": "function", "function": {"name": "now"}}
TOOLS = [WEATHER, NOW]
NAMED = {"type": "function", "function": {"name": "weather"}}
TOKENIZER = chat_tokenizer("qwen3")
CHAT = make_reader("qwen3", TOKENIZER)
PARAMS = SamplingParams(max_tokens=None)


def schema_of(tools: list[dict[str, Any]], choice: Any) -> Any:
    forced = forced_output(tools, choice)
    assert forced is not None
    return json.loads(forced.constraint.text)


def with_definition(name: str, definition: dict[str, Any]) -> dict[str, Any]:
    parameters = {
        "type": "object",
        "properties": {"a": {"$ref": "#/$defs/A"}},
        "$defs": {"A": definition},
    }
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


def test_what_forces_nothing() -> None:
    for choice in (None, "auto", "none"):
        assert forced_output(TOOLS, choice) is None


def test_a_named_function_has_its_own_schema() -> None:
    assert schema_of(TOOLS, NAMED) == WEATHER["function"]["parameters"]
    empty = schema_of(TOOLS, {"type": "function", "function": {"name": "now"}})
    assert empty == {"type": "object", "additionalProperties": False}


def test_required_is_a_list_of_calls_with_shared_definitions_at_its_root() -> None:
    tools = [with_definition("f", {"type": "string"}), with_definition("g", {"type": "string"})]
    schema = schema_of(tools, "required")
    assert (schema["type"], schema["minItems"]) == ("array", 1)
    assert schema["$defs"] == {"A": {"type": "string"}}
    names = [item["properties"]["name"]["const"] for item in schema["items"]["anyOf"]]
    assert names == ["f", "g"]
    assert "$defs" not in schema["items"]["anyOf"][0]["properties"]["parameters"]
    assert "$defs" in tools[0]["function"]["parameters"], "what the caller gave is left alone"


@pytest.mark.parametrize(
    ("tools", "choice", "words"),
    [
        (None, "required", "^tool_choice = 'required': needs tools"),
        (TOOLS, "sometimes", "^tool_choice = 'sometimes': must be 'auto'"),
        (TOOLS, {"type": "function"}, "^tool_choice = .*must be 'auto'"),
        (TOOLS, {"function": {"name": "f"}}, "^tool_choice = 'f': is none of .*weather, now"),
        (TOOLS, 3, "^tool_choice = 3: must be"),
        (
            [with_definition("f", {"type": "string"}), with_definition("g", {"type": "integer"})],
            "required",
            "^tools = 'A': two tools have other",
        ),
    ],
)
def test_choices_are_checked(tools: Any, choice: Any, words: str) -> None:
    with pytest.raises(InvalidInputError, match=words):
        forced_output(tools, choice)


def read(text: str, choice: Any) -> dict[str, Any]:
    reader = CHAT.reader(prompt_of(CHAT), PARAMS, tools=TOOLS, tool_choice=choice, request_id="1")
    return read_response(reader, ids_of(TOKENIZER, text))


def test_forced_answers_are_read() -> None:
    (call,) = read('{"city": "Köln"}<|im_end|>', NAMED)["tool_calls"]
    assert call["function"] == {"name": "weather", "arguments": '{"city": "Köln"}'}
    text = '[{"name": "now", "parameters": {}}, {"name": "weather", "parameters": {"city": "a"}}]'
    message = read(text, "required")
    assert message["content"] is None
    functions = [call["function"] for call in message["tool_calls"]]
    assert functions == [
        {"name": "now", "arguments": "{}"},
        {"name": "weather", "arguments": '{"city": "a"}'},
    ]
    assert len({call["id"] for call in message["tool_calls"]}) == 2


@pytest.mark.parametrize(
    ("text", "choice"),
    [
        ('{"city": "K', NAMED),
        ("[1]", NAMED),
        ('[{"name": "now", "parameters": {}}, {"na', "required"),
        ('[{"name": "now"}]', "required"),
        ("3", "required"),
    ],
)
def test_a_forced_answer_that_was_cut_is_content(text: str, choice: Any) -> None:
    message = read(text, choice)
    assert (message["content"], message["tool_calls"]) == (text, [])
