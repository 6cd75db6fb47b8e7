"""Structural tags: the texts that they allow, and refusals by name."""

from __future__ import annotations

import itertools
import json
import re
from typing import Any

import pytest

from pagespec import InvalidInputError, StructuredOutputs
from tests.structured.test_grammars import allows

WEATHER = {
    "type": "object",
    "properties": {"city": {"type": "string"}},
    "required": ["city"],
    "additionalProperties": False,
}
CALL = '<function=get>{"city":"a"}</function>'
STRUCTURE = {"begin": "<function=get>", "schema": WEATHER, "end": "</function>"}
OLD = {"type": "structural_tag", "structures": [STRUCTURE], "triggers": ["<function="]}
FLAG = {"type": "tag", "begin": "hello_flag", "content": {"type": "any_text"}, "end": "hello"}
LETTERS = {
    "type": "tag",
    "begin": "no:",
    "content": {"type": "regex", "pattern": "[a/]+"},
    "end": "a",
}
YES = {"type": "const_string", "value": "yes"}


def triggered(*tags: Any, triggers: tuple[str, ...] = ("hello",), **others: Any) -> dict[str, Any]:
    return {"type": "triggered_tags", "triggers": triggers, "tags": tags, **others}


# A tag, texts that it allows, and texts that it does not.
TAGS: list[tuple[dict[str, Any], list[str], list[str]]] = [
    (
        OLD,
        ["", "a < b <function", f"<\u00e9 {CALL}", f"{CALL}{CALL}", f"{CALL} and\n<{CALL}."],
        ["<function=", "<function=x", CALL.replace('"a"', "1"), CALL[:-1], f"{CALL}<function="],
    ),
    (
        {"format": triggered(FLAG, stop_after_first=False)},
        [
            "",
            "Hello",
            "hello_flaghello",
            "x hello_flag hellhello",
            "hello_flag hello hello_flaghello",
        ],
        ["hello", "hello_flag", "hello_flag hello hello"],
    ),
    (
        {"format": triggered(FLAG, stop_after_first=True)},
        ["x", "hello_flaghello"],
        ["hello_flaghello "],
    ),
    (
        {"format": {"type": "or", "elements": [YES, LETTERS]}},
        ["yes", "no:/a", "no:aaa"],
        ["no:a", "yesno:aa", ""],
    ),
    ({"format": {"type": "any_text", "excludes": ["ab", "c"]}}, ["", "b a"], ["c", "zab"]),
    (
        {
            "format": {
                "type": "sequence",
                "elements": [FLAG, YES, {"type": "json_schema", "json_schema": True}],
            }
        },
        ['hello_flag.helloyes{"a":1}', "hello_flaghelloyes2"],
        ["hello_flagyes1", "hello_flaghelloyes", "yes1"],
    ),
]


@pytest.mark.parametrize(("tag", "allowed", "others"), TAGS, ids=lambda value: str(value)[:40])
def test_tags_allow_free_text_and_their_content(
    tag: dict[str, Any], allowed: list[str], others: list[str]
) -> None:
    for is_allowed, texts in ((True, allowed), (False, others)):
        for text in texts:
            assert allows(text, structural_tag=json.dumps(tag)) == is_allowed, text
            assert allows(text, structural_tag=tag) == is_allowed, text


def test_all_short_texts_are_those_of_a_regex() -> None:
    content = {"type": "const_string", "value": "b"}
    one = {"type": "tag", "begin": "<a", "content": content, "end": "<"}
    other = {"type": "tag", "begin": "<b", "content": {"type": "any_text"}, "end": "aa"}
    tag = {"format": triggered(one, other, triggers=("<",))}
    expected = re.compile("([^<]*<(ab<|b(?:(?!aa).)*?aa))*[^<]*")
    for length in range(7):
        for letters in itertools.product("<ab", repeat=length):
            text = "".join(letters)
            assert allows(text, structural_tag=tag) == bool(expected.fullmatch(text)), text


def test_whitespace_and_additional_properties_follow_the_arguments() -> None:
    tag = {"format": {"type": "json_schema", "json_schema": {"properties": {"a": {}}}}}
    for text, name in (
        ('{"a": 1}', "disable_any_whitespace"),
        ('{"b":1}', "disable_additional_properties"),
    ):
        assert allows(text, structural_tag=tag)
        assert not allows(text, structural_tag=tag, **{name: True})


REFUSED: list[tuple[Any, str]] = [
    ("not json", "must be JSON"),
    ("", "must be JSON"),
    ("[]", "must be an object of type 'structural_tag'"),
    ({"type": "structural_tag"}, r"structures = None: must be given"),
    ({"format": None}, r"format\.type = None: must be one of const_string"),
    ({"format": {}}, r"format\.type = None: must be one of const_string"),
    ({"format": {"type": "tags_with_separator"}}, r"format\.type = 'tags_with_separator'"),
    ({"format": YES, "triggers": []}, r"triggers.*is not supported"),
    ({**OLD, "structures": []}, "structures.*must be a list, not empty"),
    ({**OLD, "triggers": ["x"]}, r"tags\[0\]\.begin.*must begin with a trigger"),
    ({**OLD, "triggers": ["<", "<f"]}, "'<': is inside another trigger"),
    ({**OLD, "structures": [STRUCTURE] * 2}, "must not begin another alternative too"),
    ({**OLD, "structures": [{**STRUCTURE, "schema": {"extends": 1}}]}, "json_schema = 'extends'"),
    ({"format": triggered(FLAG, at_least_one=True)}, r"at_least_one = True: is not supported"),
    ({"format": {**FLAG, "end": ["a", "b"]}}, r"end = .*must be text"),
    ({"format": {**FLAG, "end": ""}}, r"end = '': must not be empty after any_text"),
    (
        {"format": triggered({**LETTERS, "begin": "hello"})},
        "must not be regex where text may follow",
    ),
    (
        {
            "format": triggered(
                {**FLAG, "content": {"type": "json_schema", "json_schema": True}, "end": "1"}
            )
        },
        "must begin with a character that no number has",
    ),
    (
        {"format": {"type": "json_schema", "json_schema": {}, "style": "qwen_xml"}},
        r"style = 'qwen_xml': must be 'json'",
    ),
]


@pytest.mark.parametrize(("tag", "message"), REFUSED, ids=lambda value: str(value)[:50])
def test_what_is_not_exact_is_refused_by_name(tag: Any, message: str) -> None:
    with pytest.raises(InvalidInputError, match=message) as refused:
        StructuredOutputs(structural_tag=tag)
    assert refused.value.field.startswith("structured_outputs.structural_tag")
