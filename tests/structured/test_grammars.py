"""Constraints compiled for a tokenizer: the texts that they allow, and rejected constraints."""

from __future__ import annotations

import contextlib
import random
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pagespec import EngineBusyError, InvalidInputError, StructuredOutputs
from pagespec.engine.json_schemas import implemented
from pagespec.engine.structured_config import StructuredOutputsConfig
from pagespec.structured import grammars as module
from pagespec.structured.grammars import Grammars
from tests.support.structured import END, NUM_TOKENS, check_output, random_outputs, tokenizer
from tests.support.tokenizers import byte_fallback, byte_level, text_of

GRAMMARS = Grammars(tokenizer(), 320, {END})


def walk(outputs: StructuredOutputs, rng: random.Random, length: int) -> tuple[list[int], str]:
    """Random tokens that the bitmasks allow, and why the text ends."""
    matcher, output = GRAMMARS.matcher(outputs), []
    while len(output) < length:
        bits = np.unpackbits(np.frombuffer(matcher.compute_bitmask(), np.uint8), bitorder="little")
        allowed = np.flatnonzero(bits).tolist()
        assert (END in allowed) == matcher.is_accepting()
        token = END if END in allowed and rng.random() < 0.5 else rng.choice(allowed)
        output.append(token)
        assert matcher.consume_token(token)
        if token == END:
            return output, "stop"
    return output, "length"


@settings(max_examples=120)
@given(st.integers(0, 2**32))
def test_allowed_texts_match_their_constraints(seed: int) -> None:
    rng = random.Random(seed)
    outputs, is_met = random_outputs(rng)
    check_output(*walk(outputs, rng, 80), is_met)


_PATTERNS = {"patternProperties": {"^a": {"type": "integer"}, "^b": {"type": "null"}}}

REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"json": _PATTERNS}, "patternProperties.*needs additionalProperties = false"),
    ({"json": {"patternProperties": {"^a": {}, "b$": {}}, "additionalProperties": False}}, "disj"),
    ({"json": {"minProperties": 2, "required": ["a", "a"]}}, r"at most 1.*names \(1\)"),
    ({"json": {"not": {}}}, "not"),
    ({"json": {"uniqueItems": True}}, "uniqueItems"),
    ({"json": {"type": "string", "format": "nothing"}}, "nothing"),
    ({"json": {"type": "whatever"}}, "whatever"),
    ({"json": {"$ref": "http://example.com/schema"}}, "example.com"),
    ({"json": {"minimum": 3, "maximum": 2, "type": "integer"}}, "minimum"),
    ({"json": {"type": "object", "properties": {"a": False}, "required": ["a"]}}, "unsatisf"),
    ({"json_object": True, "whitespace_pattern": "(("}, "regex"),
    ({"regex": "(?=a)"}, "look-around"),
    ({"grammar": "start: missing"}, "missing"),
    ({"grammar": "] garbage ["}, "garbage"),
    ({"grammar": "not a grammar"}, "Failed to convert the grammar "),
    ({"grammar": 'start: more\nmore: more "x"'}, "no text|grammar"),
]


@pytest.mark.parametrize(("asked", "message"), REFUSED)
def test_what_the_compiler_cannot_keep_is_refused(asked: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidInputError, match=message) as refused:
        GRAMMARS.check(StructuredOutputs(**asked))
    assert refused.value.field.startswith("structured_outputs.")


def allows(text: str, grammars: Grammars = GRAMMARS, **asked: Any) -> bool:
    matcher = grammars.matcher(StructuredOutputs(**asked))
    ids = tokenizer().backend_tokenizer.encode(text, add_special_tokens=False).ids
    return matcher.try_consume_tokens(ids) == len(ids) and bool(matcher.is_accepting())


def test_whitespace_follows_the_setting() -> None:
    tight, loose = '{"a":[1,2]}', '{ "a" : [1,\n2]}'
    assert allows(tight, json_object=True)
    assert allows(loose, json_object=True)
    assert not allows(loose, json_object=True, disable_any_whitespace=True)
    assert allows(tight, json_object=True, disable_any_whitespace=True)
    assert not allows(loose, json_object=True, whitespace_pattern="[ ]?")
    assert allows('{ "a": 1}', json_object=True, whitespace_pattern="[ ]?")


_NAMED = {"properties": {"a": {"type": "integer"}, "b": {}}, "required": ["a", "b"]}
# A schema, texts that it allows, and texts that it does not.
OBJECTS: list[tuple[dict[str, Any], str, str]] = [
    (
        {**_PATTERNS, "additionalProperties": False},
        '{} {"a":1} {"ab":2,"b":null} {"b":null,"a":1}',
        '{"a":null} {"c":1} {"\\u0061":1} {"b":1}',
    ),
    (
        {**_PATTERNS, "properties": {"a": {"minimum": 3}}, "additionalProperties": False},
        '{"a":3} {"a":5,"aa":1}',
        '{"a":2} {"a":"x"} {"a":5,"a":1}',
    ),
    ({"minProperties": 1}, '{"a":1} [] 3', "{}"),
    ({"minProperties": 2, **_NAMED}, '{"a":1,"b":2} {"a":1,"b":2,"c":3}', '{"a":1} {}'),
    ({"maxProperties": 1}, '{} {"a":1}', '{"a":1,"b":2}'),
    ({"uniqueItems": False}, "[1,1]", "[1"),
]


@pytest.mark.parametrize(("schema", "allowed", "others"), OBJECTS)
def test_schemas_of_objects_mean_what_the_standard_says(
    schema: dict[str, Any], allowed: str, others: str
) -> None:
    for is_allowed, texts in ((True, allowed), (False, others)):
        for text in texts.split():
            assert allows(text, json=schema) == is_allowed, text


def test_additional_properties_can_be_disabled() -> None:
    inner = {"properties": {"x": {}}, "const": {"properties": {}}}
    schema = {"properties": {"properties": {"anyOf": [inner, {"additionalProperties": True}]}}}
    assert allows('{"a":1}', json=schema)
    assert not allows('{"a":1}', json=schema, disable_additional_properties=True)
    outputs = StructuredOutputs(json=_PATTERNS, disable_additional_properties=True)
    GRAMMARS.check(outputs)
    closed = implemented(schema, closes_objects=True)
    first, second = closed["properties"]["properties"]["anyOf"]
    assert closed["additionalProperties"] is False
    assert first == {**inner, "additionalProperties": False}
    assert second == {"additionalProperties": True}


def test_the_engine_has_defaults_for_constraints() -> None:
    config = StructuredOutputsConfig(
        disable_any_whitespace=True, disable_additional_properties=True
    )
    strict = Grammars(tokenizer(), 320, {END}, config)
    schema = {"properties": {"a": {}}, "required": ["a"]}
    asked: list[dict[str, Any]] = [
        {"json": schema},
        {"json": {**schema, "additionalProperties": True}},
        {"json": schema, "whitespace_pattern": " ?"},
    ]
    texts = ['{"a":1}', '{"a": 1}', '{"a":1,"b":1}']
    found = [[allows(text, grammars=strict, **one) for text in texts] for one in asked]
    assert found == [[True, False, False], [True, False, True], [True, True, False]]


def test_regexes_match_the_whole_text() -> None:
    assert allows("ab", regex="ab")
    assert allows("ab", regex="^ab$")
    assert not allows("abc", regex="ab")


def test_a_grammar_may_be_gbnf() -> None:
    assert allows("ab", grammar='root ::= "a" tail\ntail ::= "b" | "c"')


@pytest.mark.parametrize(
    ("grammar", "allowed", "others"),
    [
        (r'root ::= "\u00e9\x41" [\u00e8-\U000000ea\U0001F600]', ["éAé", "éA\U0001f600"], ["éAë"]),
        ('root ::= "a" # "|"\n  | "b." # c\n\t| [.#]', ["a", "b.", ".", "#"], ["bc", "c", ""]),
        ('root ::= "(" root ")" | .', ["((x))", "\n", "(\n)"], ["", "(x"]),
        ('root ::= "\\"" x "\\\\u"\nx ::= [^\\]\\\\]+', ['"ab\\u'], ['"]\\u', '"\\u']),
    ],
)
def test_gbnf_has_escapes_line_breaks_and_comments(
    grammar: str, allowed: list[str], others: list[str]
) -> None:
    for text in allowed:
        assert allows(text, grammar=grammar), text
    for text in others:
        assert not allows(text, grammar=grammar), text


class Watched(Grammars):
    """Records compiled constraints, after it calls ``before``."""

    def __init__(self, before: Callable[[str], object] = lambda _: None) -> None:
        super().__init__(tokenizer(), NUM_TOKENS, {END})
        self.before, self.compiled = before, list[str]()

    def _compile(self, constraint: Any) -> Any:
        self.compiled.append(constraint.text)
        self.before(constraint.text)
        return super()._compile(constraint)


def test_a_constraint_is_compiled_once_and_the_oldest_forgotten() -> None:
    grammars = Watched()
    others = [f"c{i}" for i in range(module.MAX_KEPT_GRAMMARS - 1)]
    for regex in ("a", "b", "a", *others, "a", "b"):
        grammars.matcher(StructuredOutputs(regex=regex))
    assert grammars.compiled == ["a", "b", *others, "b"]


def chained(num_definitions: int) -> dict[str, Any]:
    last = num_definitions - 1
    chain = {f"d{i}": {"$ref": f"#/$defs/d{i + 1}"} for i in range(last)}
    return {"$defs": chain | {f"d{last}": {"type": "string"}}, "$ref": "#/$defs/d0"}


def test_long_chains_do_not_end_the_process() -> None:
    """A regression test: 3,000 references ended the process with a stack of 8 MiB."""
    rules = "".join(f'r{i}: "x" r{i + 1}\n' for i in range(13_000))
    for outputs in (
        StructuredOutputs(json=chained(6_000)),
        StructuredOutputs(grammar=f'start: r0\n{rules}r13000: "e"'),
    ):
        grammars = Grammars(tokenizer(), NUM_TOKENS, {END})
        with contextlib.suppress(InvalidInputError):
            grammars.check(outputs)
            matcher = grammars.matcher(outputs)
            assert matcher.compute_bitmask()


def test_nothing_waits_for_a_long_compilation(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_MAX_COMPILE_S", 0.2)
    go_on = threading.Event()
    grammars = Watched(lambda text: text == "slow" and go_on.wait(30))
    kept = StructuredOutputs(regex="kept")
    grammars.check(kept)
    slow = StructuredOutputs(regex="slow")
    for _ in range(module._MAX_COMPILING):
        with pytest.raises(InvalidInputError, match="too long"):
            grammars.check(slow)
    with pytest.raises(EngineBusyError):
        grammars.check(StructuredOutputs(regex="other"))
    # Steps of the engine need not wait, also if it was forgotten meanwhile.
    grammars._kept.clear()
    assert grammars.matcher(kept).compute_bitmask()
    go_on.set()
    time.sleep(0.1)
    grammars.check(StructuredOutputs(regex="other"))


def test_a_popular_grammar_has_several_lexers() -> None:
    grammars = Watched()
    outputs = StructuredOutputs(regex="ab*")
    for _ in range(module._NUM_LEXERS + 3):
        grammars.check(outputs)
    assert len(grammars.compiled) == module._NUM_LEXERS
    masks = {bytes(grammars.matcher(outputs).compute_bitmask()) for _ in range(20)}
    assert len(masks) == 1
    assert len(grammars.compiled) == module._NUM_LEXERS


@pytest.mark.parametrize("is_slow", [False, True])
def test_nothing_waits_for_another_lexer(is_slow: bool) -> None:
    """Neither while others compile, nor if the first one took long."""
    grammars = Watched(lambda _: time.sleep(2 * module._MAX_COMPILE_AGAIN_S * is_slow))
    known = StructuredOutputs(regex="known")
    grammars.check(known)
    for _ in range(module._MAX_COMPILING):  # others compile for ever
        grammars._places.acquire()
    grammars.check(known)
    assert len(grammars.compiled) == 1
    for _ in range(module._MAX_COMPILING):
        grammars._places.release()
    grammars.check(known)
    assert len(grammars.compiled) == 2 - is_slow


def test_matchers_do_not_share_their_place() -> None:
    outputs = StructuredOutputs(regex="ab")
    one, other = GRAMMARS.matcher(outputs), GRAMMARS.matcher(outputs)
    assert one.consume_token(3 + ord("a"))
    assert one.consume_token(3 + ord("b"))
    assert one.is_accepting()
    assert not other.is_accepting()


@pytest.mark.parametrize("make", [byte_level, byte_fallback])
@pytest.mark.parametrize(
    ("asked", "text"),
    [
        ({"choice": ["x</s>"]}, "x</s>"),
        ({"choice": ["<unk>a<s>"]}, "<unk>a<s>"),
        ({"regex": "a[<]s>b"}, "a<s>b"),
        ({"json": {"const": "</s>"}}, '"</s>"'),
        ({"grammar": 'start: "x</s>"'}, "x</s>"),
        ({"grammar": 'start: "a" <s> "b</s>"'}, "ab</s>"),
    ],
)
def test_text_that_spells_a_special_token_is_not_that_token(
    make: Any, asked: dict[str, Any], text: str
) -> None:
    own = make()
    matcher = Grammars(own, 320, {END}).matcher(StructuredOutputs(**asked))
    output: list[int] = []
    while not output or output[-1] != END:
        bits = np.unpackbits(np.frombuffer(matcher.compute_bitmask(), np.uint8), bitorder="little")
        output.append(int(np.flatnonzero(bits)[-1]))
        assert matcher.consume_token(output[-1])
    assert text_of(own, output) == text
    assert (1 in output) == ("<s> " in str(asked)), "only a grammar refers to a special token"


def test_a_call_without_a_thread_fails_and_the_next_is_served(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    grammars = Grammars(tokenizer(), NUM_TOKENS, {END})

    def refuse(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", refuse)
        for _ in range(module._MAX_COMPILING + 1):
            with pytest.raises(EngineBusyError, match="can't start new thread"):
                grammars.check(StructuredOutputs(regex="a"))
    grammars.check(StructuredOutputs(regex="a"))
