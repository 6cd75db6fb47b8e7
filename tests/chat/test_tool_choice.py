"""Answers that must be tool calls: their constraints, and how they are parsed."""

from __future__ import annotations

import json
from typing import Any

import pytest

from pagespec import InvalidInputError, SamplingParams
from pagespec.chat.response import read_response
from pagespec.chat.tool_choice import forced_output
from pagespec.structured.grammars import Grammars
from tests.support.chat_models import WEATHER, chat_tokenizer, ids_of, make_reader, prompt_of
from tests.support.structured import END, NUM_TOKENS
from tests.support.structured import tokenizer as byte_tokenizer

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


GRAMMARS = Grammars(byte_tokenizer(), NUM_TOKENS, {END})


def allows(tools: list[dict[str, Any]], answer: Any) -> bool:
    forced = forced_output(tools, "required")
    assert forced is not None
    text = json.dumps(answer, separators=(",", ":"))
    ids = byte_tokenizer().backend_tokenizer.encode(text, add_special_tokens=False).ids
    matcher = GRAMMARS.matcher(forced)
    return matcher.try_consume_tokens(ids) == len(ids) and bool(matcher.is_accepting())


def test_required_is_a_list_of_calls_each_with_its_own_definitions() -> None:
    tools = [with_definition("f", {"type": "string"}), with_definition("g", {"type": "integer"})]
    assert allows(tools, [{"name": "f", "parameters": {"a": "x"}}])
    assert allows(tools, [{"name": name, "parameters": {"a": a}} for name, a in [("g", 1)] * 2])
    assert not allows(tools, [{"name": "f", "parameters": {"a": 1}}])
    assert not allows(tools, [{"name": "h", "parameters": {}}])
    assert not allows(tools, [])
    parameters = tools[0]["function"]["parameters"]
    assert parameters["properties"]["a"] == {"$ref": "#/$defs/A"}, "the caller's is left alone"


def test_references_of_a_tool_count_from_its_own_schema() -> None:
    parameters = {
        "type": "object",
        "properties": {
            "child": {"$ref": "#"},
            "$ref": {"$ref": "#/definitions/X"},
            "const": {"const": {"$ref": "#"}},
        },
        "definitions": {"X": {"type": "integer"}},
        "additionalProperties": False,
    }
    tools = [{"type": "function", "function": {"name": "f", "parameters": parameters}}]
    assert allows(tools, [{"name": "f", "parameters": {"child": {"child": {}, "$ref": 3}}}])
    assert allows(tools, [{"name": "f", "parameters": {"const": {"$ref": "#"}}}])
    assert not allows(tools, [{"name": "f", "parameters": {"$ref": "x"}}])
    assert not allows(tools, [{"name": "f", "parameters": {"child": [{"name": "f"}]}}])


@pytest.mark.parametrize("definitions", [None, 3, {}])
def test_definitions_that_nothing_refers_to_say_nothing(definitions: Any) -> None:
    parameters = {"type": "object", "additionalProperties": False, "$defs": definitions}
    tools = [{"type": "function", "function": {"name": "f", "parameters": parameters}}]
    assert allows(tools, [{"name": "f", "parameters": {}}])


def nested(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "object"}
    for _ in range(depth):
        schema = {"type": "object", "properties": {"a": schema}}
    return {"type": "function", "function": {"name": "f", "parameters": schema}}


@pytest.mark.parametrize(
    ("tools", "choice", "words"),
    [
        (None, "required", "^tool_choice = 'required': needs tools"),
        (TOOLS, "sometimes", "^tool_choice = 'sometimes': must be 'auto'"),
        (TOOLS, {"type": "function"}, "^tool_choice = .*must be 'auto'"),
        (TOOLS, {"function": {"name": "f"}}, "^tool_choice = 'f': is none of .*weather, now"),
        (TOOLS, 3, "^tool_choice = 3: must be"),
        ([nested(400)], "required", "^tools = 'a schema': must be nested at most 64 deep"),
        (
            [with_definition("f", {"description": "x" * 300_000})],
            "required",
            "^tools = '300... bytes': must be at most 262144 bytes",
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
