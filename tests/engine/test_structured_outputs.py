"""Constraints in sampling parameters: accepted forms, and rejections by name."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest
from pydantic import BaseModel

from pagespec import InvalidInputError, SamplingParams, StructuredOutputs, StructuredOutputsParams
from pagespec.engine.structured_outputs import MAX_CONSTRAINT_BYTES


class Person(BaseModel):
    name: str
    age: int


@pytest.mark.parametrize("schema", [Person, Person.model_json_schema()])
def test_a_schema_may_be_a_model_a_dict_or_text(schema: Any) -> None:
    as_text = StructuredOutputs(json=json.dumps(Person.model_json_schema()))
    assert StructuredOutputs(json=schema).constraint == as_text.constraint


def test_its_name_in_vllm_is_the_same_class() -> None:
    assert StructuredOutputsParams is StructuredOutputs


def test_positions_are_those_of_vllm() -> None:
    made = StructuredOutputs(None, None, None, None, True, False, True, " ?", None)
    named = StructuredOutputs(
        json_object=True, disable_additional_properties=True, whitespace_pattern=" ?"
    )
    assert made == named
    assert made.constraint == named.constraint
    others = {"backend": "guidance", "disable_fallback": True}
    assert StructuredOutputs(regex="a", **others) == StructuredOutputs(regex="a")


def test_xgrammar_closes_objects_as_that_library_does() -> None:
    for constraint in ({"json": {"properties": {"a": {}}}}, {"json_object": True}):
        closed = StructuredOutputs(**constraint, backend="xgrammar").constraint
        assert closed == StructuredOutputs(**constraint).constraint._replace(closes_objects=True)
    assert not StructuredOutputs(regex="a", backend="xgrammar").constraint.closes_objects


def test_names_in_a_schema_are_no_keywords() -> None:
    names = {"patternProperties": {"type": "string"}, "x-guidance": {"const": {"extends": 1}}}
    StructuredOutputs(json={"properties": names, "default": {"minProperties": 3}})


def test_a_schema_that_is_too_large_is_not_walked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pagespec.engine.structured_outputs.check_keywords", None)
    large = {"properties": {f"name{i}": {} for i in range(20_000)}}
    for schema in (large, json.dumps(large)):
        with pytest.raises(InvalidInputError, match=f"at most {MAX_CONSTRAINT_BYTES} bytes"):
            StructuredOutputs(json=schema)


TOO_LONG: dict[str, dict[str, Any]] = {
    "names": {"json": {"properties": {f"name{i}": {} for i in range(40_000)}}},
    "values": {"json": {"enum": [1] * 200_000}},
    "objects": {"json": {"const": [{"": 1}] * 50_000}},
    "lists": {"json": {"const": [[[]]] * 150_000}},
    "one text": {"json": {"const": "a" * 300_000}},
    "choices": {"choice": ["a"] * 150_000},
    "long choices": {"choice": ["a" * 1000] * 300},
}


@pytest.mark.parametrize("kind", TOO_LONG)
def test_what_is_too_long_is_not_written(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The writer in C holds the interpreter until all of it is written."""
    monkeypatch.setattr("pagespec.engine.structured_outputs.json", SimpleNamespace())
    with pytest.raises(InvalidInputError, match=f"at most {MAX_CONSTRAINT_BYTES} bytes"):
        StructuredOutputs(**TOO_LONG[kind])


@pytest.mark.parametrize("item", [1, "", [], {}, {"": 1}, [[1], {"a": None}], "\n\u00e9"])
def test_what_just_fits_is_taken(item: Any) -> None:
    number = (MAX_CONSTRAINT_BYTES - len('{"const": []}')) // (len(json.dumps(item)) + 2)
    assert StructuredOutputs(json={"const": [item] * number}).constraint.kind == "json"
    with pytest.raises(InvalidInputError, match=f"at most {MAX_CONSTRAINT_BYTES} bytes"):
        StructuredOutputs(json={"const": [item] * (number + 2)})


_NESTED: dict[str, Any] = {}
for _ in range(100):
    _NESTED = {"items": _NESTED}

REFUSED: list[tuple[dict[str, Any], str]] = [
    ({}, "You must use one kind of structured outputs constraint"),
    ({"regex": "a", "choice": ["b"]}, "You can only use one kind of structured outputs constraint"),
    ({"regex": "a", "json_object": False}, "You can only use one kind"),
    ({"json_object": False}, "json_object"),
    ({"json": "{"}, "json = .*must be a JSON schema"),
    ({"json": "[1]"}, "a JSON schema is an object"),
    ({"json": {"type": {1, 2}}}, "must be a JSON schema"),
    ({"json": int}, "must be a JSON schema"),
    ({"json": {"minimum": float("nan")}}, "must be a JSON schema"),
    ({"json": _NESTED}, "nested at most"),
    ({"json": {"items": {"patternProperties": {"a": {"extends": 1}}}}}, "extends"),
    ({"json": {"x-guidance": {"lenient": True}}}, "x-guidance"),
    ({"json": {"$defs": {"a": {"divisibleBy": 2}}}}, "divisibleBy"),
    ({"json_object": 1}, "json_object"),
    ({"regex": ""}, "regex"),
    ({"regex": 3}, "regex"),
    ({"regex": "\ud800"}, "not Unicode"),
    ({"regex": "a" * (MAX_CONSTRAINT_BYTES + 1)}, "bytes long"),
    ({"choice": []}, "choice"),
    ({"choice": "abc"}, "choice"),
    ({"choice": ["a", ""]}, "choice"),
    ({"grammar": ["start"]}, "grammar"),
    ({"json_object": True, "whitespace_pattern": " ", "disable_any_whitespace": True}, "pattern"),
    ({"regex": "a", "disable_any_whitespace": True}, "is for json"),
    ({"regex": "a", "disable_additional_properties": True}, "disable_additional_properties"),
    ({"regex": "a", "disable_fallback": 1}, "disable_fallback"),
    ({"regex": "a", "backend": "outlines"}, "backend.*auto, guidance, xgrammar"),
    ({"structural_tag": "{}"}, "structural_tag"),
    ({"structural_tag": {"format": {"type": "any_text"}}, "whitespace_pattern": " "}, "pattern"),
]


@pytest.mark.parametrize(("given", "message"), REFUSED)
def test_what_would_not_be_kept_is_refused_by_name(given: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidInputError, match=message) as refused:
        StructuredOutputs(**given)
    assert refused.value.field.startswith("structured_outputs")


def test_parameters_take_nothing_else() -> None:
    with pytest.raises(InvalidInputError, match="must be a StructuredOutputs"):
        SamplingParams(structured_outputs={"regex": "a"})  # type: ignore[arg-type]


def test_parameters_with_a_schema_can_be_keys() -> None:
    params = SamplingParams(structured_outputs=StructuredOutputs(json={"type": "null"}))
    assert {params: 1}[params] == 1
