"""Constraints on an answer's text: a JSON schema, a regex, a choice or a grammar."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, NoReturn

from ..errors import InvalidInputError
from ..params.checks import is_list
from .json_schemas import check_keywords
from .structural_tags import structural_grammar

MAX_CONSTRAINT_BYTES = 1 << 18

_KINDS = ("json", "regex", "choice", "grammar", "json_object", "structural_tag")
BACKENDS = ("auto", "guidance", "xgrammar")
"""vLLM's names of libraries that llguidance stands for."""
CLOSING_BACKENDS = ("xgrammar",)
"""Those of ``BACKENDS`` that close objects with named properties, like
``disable_additional_properties``."""


class Constraint(NamedTuple):
    """One constraint in a comparable form, ready to be compiled.

    Attributes:
        kind: "json" (a schema), "regex", "choice" (a JSON list), "grammar" or
            "structural_tag" (its JSON).
        closes_objects: whether ``additionalProperties`` is false by default.
    """

    kind: str
    text: str
    any_whitespace: bool = True
    whitespace_pattern: str | None = None
    closes_objects: bool = False


@dataclass(frozen=True, slots=True)
class StructuredOutputs:
    """A constraint on the text of an answer; exactly one kind. Names and order as in
    vLLM.

    Attributes:
        json: a JSON schema, as a dict, as JSON text, or as a pydantic model class.
        regex: the whole text matches it (syntax of Rust's ``regex``: no look-around, no
            back-references).
        choice: the text equals one of these.
        grammar: Lark syntax as in llguidance, or GBNF; its start rule is ``start`` or ``root``.
        json_object: True: any JSON object.
        disable_any_whitespace: for JSON: no whitespace between tokens.
        disable_additional_properties: for ``json``: objects with named properties have no others,
            unless the schema has ``additionalProperties``.
        whitespace_pattern: for JSON: a regex for whitespace between tokens.
        structural_tag: text with tags, as a dict or JSON text in one of vLLM's two forms.
        backend: "auto", "guidance" or "xgrammar"; llguidance compiles all constraints. "xgrammar"
            sets ``disable_additional_properties``, as that library does.
        disable_fallback: no effect, because there is one backend.

    Raises:
        InvalidInputError: not exactly one constraint is given, or it is malformed, too large, or
            uses a feature that would not be enforced.
    """

    json: str | Mapping[str, Any] | type | None = None
    regex: str | None = None
    choice: Sequence[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    disable_any_whitespace: bool = False
    disable_additional_properties: bool = False
    whitespace_pattern: str | None = None
    structural_tag: str | Mapping[str, Any] | None = None
    backend: str | None = field(default=None, kw_only=True, compare=False)
    disable_fallback: bool = field(default=False, kw_only=True, compare=False)
    constraint: Constraint = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if self.backend not in (None, *BACKENDS):
            _refuse("backend", self.backend, f"must be one of {', '.join(BACKENDS)}")
        for name in ("disable_any_whitespace", "disable_additional_properties", "disable_fallback"):
            if not isinstance(getattr(self, name), bool):
                _refuse(name, getattr(self, name), "must be True or False")
        kind = self._kind()
        makers = {
            "json": self._json_text,
            "json_object": self._json_object_text,
            "choice": self._choice_text,
            "structural_tag": self._tag_text,
        }
        text = makers[kind]() if kind in makers else _require_text(kind, getattr(self, kind))
        _require_short(kind, text)
        kind = "json" if kind == "json_object" else kind
        has_json = kind in ("json", "structural_tag")
        if self.disable_additional_properties and not has_json:
            _refuse("disable_additional_properties", True, "is for json and structural_tag only")
        if kind == "structural_tag" and self.whitespace_pattern is not None:
            _refuse(
                "whitespace_pattern", self.whitespace_pattern, "is for json and json_object only"
            )
        whitespace = self._whitespace(has_json)
        constraint = Constraint(kind, text, *whitespace, has_json and self._closes_objects)
        object.__setattr__(self, "constraint", constraint)

    def _kind(self) -> str:
        """The name of the one constraint."""
        given = [name for name in _KINDS if getattr(self, name) is not None]
        if len(given) == 1:
            return given[0]
        limit = "You must use one kind of structured outputs constraint"
        if given:
            limit = "You can only use one kind of structured outputs constraint"
        raise InvalidInputError("structured_outputs", given, f"{limit}: {', '.join(_KINDS)}")

    @property
    def _closes_objects(self) -> bool:
        return self.disable_additional_properties or self.backend in CLOSING_BACKENDS

    def _whitespace(self, is_json: bool) -> tuple[bool, str | None]:
        disabled, pattern = self.disable_any_whitespace, self.whitespace_pattern
        if pattern is not None and (not isinstance(pattern, str) or disabled):
            limit = "must be text, and cannot be used with disable_any_whitespace"
            _refuse("whitespace_pattern", pattern, limit)
        if not is_json and (disabled or pattern is not None):
            name = "disable_any_whitespace" if disabled else "whitespace_pattern"
            _refuse(name, getattr(self, name), "is for json and json_object only")
        return not disabled, pattern

    def _json_text(self) -> str:
        schema: Any = self.json
        make = getattr(schema, "model_json_schema", None)
        if isinstance(schema, type) and make is not None:
            schema = make()
        schema, text = _parsed("json", schema, self.json, "a JSON schema")
        if not isinstance(schema, (dict, bool)) and not isinstance(schema, Mapping):
            _refuse("json", self.json, "a JSON schema is an object")
        _require_short("json", text)  # before walking all of it
        check_keywords(json.loads(text))
        return text

    def _json_object_text(self) -> str:
        if self.json_object is not True:
            _refuse("json_object", self.json_object, "must be True or not given")
        return '{"type": "object"}'

    def _tag_text(self) -> str:
        """The tag as JSON, checked."""
        tag = self.structural_tag
        _, text = _parsed("structural_tag", tag, tag, "JSON")
        _require_short("structural_tag", text)
        structural_grammar(json.loads(text), closes_objects=self._closes_objects)
        return text

    def _choice_text(self) -> str:
        choice = self.choice
        if choice is None or not is_list(choice) or not choice:
            _refuse("choice", choice, "must be a list of texts, at least one")
        _require_few("choice", choice)
        return json.dumps([_require_text("choice", text) for text in choice])


def _require_text(name: str, value: object) -> str:
    if not isinstance(value, str) or not value:
        _refuse(name, value, "must be text, not empty")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        _refuse(name, value, f"is not Unicode text ({error.reason})")
    return value


def _parsed(name: str, value: Any, given: Any, kind: str) -> tuple[Any, str]:
    """A value, read if it is JSON text, and as JSON text; ``given`` and ``kind`` are for errors."""
    try:
        if isinstance(value, str):
            _require_short(name, value)
            value = json.loads(value)
        _require_few(name, value)
        return value, json.dumps(value, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        _refuse(name, given, f"must be {kind}: {error}")


def _require_short(name: str, text: str) -> None:
    if len(text.encode("utf-8", "surrogatepass")) > MAX_CONSTRAINT_BYTES:
        limit = f"must be at most {MAX_CONSTRAINT_BYTES} bytes long"
        _refuse(name, f"{len(text)} characters", limit)


def _require_few(name: str, value: Any) -> None:
    """Refuse a value that is too long as JSON, before serialising all of it."""
    num_bytes, waiting = 0, [value]  # bytes: a lower bound, for the values visited
    while waiting:
        one = waiting.pop()
        inside: list[Any] = []
        if isinstance(one, Mapping):
            num_bytes += 4 * len(one)
            inside = [*one, *one.values()] if num_bytes <= MAX_CONSTRAINT_BYTES else []
        elif is_list(one):
            num_bytes += 2 * len(one)
            inside = list(one) if num_bytes <= MAX_CONSTRAINT_BYTES else []
        else:
            num_bytes += len(one) + 2 if isinstance(one, str) else 1
        if num_bytes > MAX_CONSTRAINT_BYTES:
            limit = f"must be at most {MAX_CONSTRAINT_BYTES} bytes long"
            _refuse(name, f"more than {MAX_CONSTRAINT_BYTES} characters", limit)
        waiting += inside


def _refuse(name: str, value: object, limit: str) -> NoReturn:
    raise InvalidInputError(f"structured_outputs.{name}", value, limit)


StructuredOutputsParams = StructuredOutputs
"""Its name in vLLM."""
