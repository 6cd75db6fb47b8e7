"""Structural tags: text in which tags with constrained content may occur, as a Lark grammar.

The forms are those of vLLM: ``{"structures": [...], "triggers": [...]}``, and ``{"format": {...}}``
with the types of :data:`_FORMATS`, named as in XGrammar. Free text is one terminal that ends with
the first trigger or end, written with complements, so no text has two readings. Combinations with
two readings are refused.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ..errors import InvalidInputError
from ..params.checks import is_list
from .json_schemas import MAX_SCHEMA_DEPTH, check_keywords, implemented

FIELD = "structured_outputs.structural_tag"
_ANY = "(?s:.*)"
_NUMBERS = frozenset("0123456789+-.eE")


def structural_grammar(
    tag: Any, *, any_whitespace: bool = True, closes_objects: bool = False
) -> str:
    """The Lark grammar of a structural tag.

    Args:
        tag: as ``json.loads`` returns it.
        any_whitespace: whether whitespace may separate the tokens of JSON content.
        closes_objects: see :func:`.json_schemas.implemented`.

    Raises:
        InvalidInputError: names the key, the value and the limit.
    """
    if not isinstance(tag, Mapping) or tag.get("type", "structural_tag") != "structural_tag":
        raise InvalidInputError(FIELD, tag, "must be an object of type 'structural_tag'")
    has_format = "format" in tag
    _check_keys(tag, ("format",) if has_format else ("structures", "triggers"), (), FIELD)
    writer = _Writer(any_whitespace, closes_objects)
    if has_format:
        start = writer.format(tag["format"], f"{FIELD}.format")
    else:
        start = writer.legacy(tag)
    return "\n".join((f"start: {start}", *writer.lines, ""))


class _Writer:
    """Writes the rules and terminals of a grammar.

    Attributes:
        lines: those written so far.
    """

    def __init__(self, any_whitespace: bool, closes_objects: bool) -> None:
        self.lines: list[str] = []
        self._guidance = {"whitespace_flexible": any_whitespace}
        self._closes_objects = closes_objects

    def legacy(self, tag: Mapping[str, Any]) -> str:
        structures = _list(tag, "structures", FIELD)
        tags = []
        for i, one in enumerate(structures):
            where = f"{FIELD}.structures[{i}]"
            _check_keys(one, ("begin", "schema", "end"), (), where)
            content = {"type": "json_schema", "json_schema": one["schema"]}
            tags.append(
                {"type": "tag", "begin": one["begin"], "content": content, "end": one["end"]}
            )
        given = {"type": "triggered_tags", "triggers": tag["triggers"], "tags": tags}
        return self._triggered_tags(given, FIELD)

    def format(self, given: Any, where: str) -> str:
        """The right-hand side of a rule for a format."""
        if where.count(".") > MAX_SCHEMA_DEPTH:
            limit = f"must be nested at most {MAX_SCHEMA_DEPTH} deep"
            raise InvalidInputError(where, "a format", limit)
        kind = given.get("type") if isinstance(given, Mapping) else None
        if not isinstance(kind, str) or kind not in _FORMATS:
            shown = kind if isinstance(given, Mapping) else given
            raise InvalidInputError(f"{where}.type", shown, f"must be one of {', '.join(_FORMATS)}")
        return _FORMATS[kind](self, given, where)

    def _const_string(self, given: Mapping[str, Any], where: str) -> str:
        _check_keys(given, ("value",), ("type",), where)
        return json.dumps(_text(given, "value", where))

    def _json_schema(self, given: Mapping[str, Any], where: str) -> str:
        _check_keys(given, ("json_schema",), ("type", "style", "any_order"), where)
        for key, only in (("style", "json"), ("any_order", False)):
            if given.get(key, only) != only:
                raise InvalidInputError(f"{where}.{key}", given[key], f"must be {only!r}")
        schema, field = given["json_schema"], f"{where}.json_schema"
        if not isinstance(schema, (Mapping, bool)):
            raise InvalidInputError(field, schema, "must be a JSON schema")
        check_keywords(schema, field)
        schema = implemented(schema, field, closes_objects=self._closes_objects)
        schema = schema if isinstance(schema, dict) else ({} if schema else {"not": {}})
        return f"%json {json.dumps({**schema, 'x-guidance': self._guidance})}"

    def _regex(self, given: Mapping[str, Any], where: str) -> str:
        _check_keys(given, ("pattern",), ("type",), where)
        return self._terminal(_regex(_text(given, "pattern", where)))

    def _any_text(self, given: Mapping[str, Any], where: str) -> str:
        _check_keys(given, (), ("type", "excludes"), where)
        return self._terminal(_without(_texts(given, "excludes", where, ())))

    def _or(self, given: Mapping[str, Any], where: str) -> str:
        """Alternatives whose texts begin with different constants: no text has two readings."""
        _check_keys(given, ("elements",), ("type",), where)
        elements = _list(given, "elements", where)
        begins = []
        for i, one in enumerate(elements):
            key = {"const_string": "value", "tag": "begin"}.get(_kind(one), "")
            if not key:
                limit = "must be const_string or tag inside 'or'"
                raise InvalidInputError(f"{where}.elements[{i}].type", _kind(one), limit)
            if key not in one:
                raise InvalidInputError(f"{where}.elements[{i}].{key}", None, "must be given")
            begins.append(_text(one, key, f"{where}.elements[{i}]"))
        _check_prefixes(begins, f"{where}.elements")
        return self._choice(
            [self.format(one, f"{where}.elements[{i}]") for i, one in enumerate(elements)]
        )

    def _sequence(self, given: Mapping[str, Any], where: str) -> str:
        """Elements whose ends are constants, then any format."""
        _check_keys(given, ("elements",), ("type",), where)
        *before, last = _list(given, "elements", where)
        parts = []
        for i, one in enumerate(before):
            place, kind = f"{where}.elements[{i}]", _kind(one)
            if kind not in ("const_string", "tag"):
                limit = "must be const_string or tag, except for the last element"
                raise InvalidInputError(f"{place}.type", kind, limit)
            parts.append(
                self._tag(one, place, is_last=False)
                if kind == "tag"
                else self._const_string(one, place)
            )
        parts.append(self._choice([self.format(last, f"{where}.elements[{len(before)}]")]))
        return " ".join(parts)

    def _tag(self, given: Mapping[str, Any], where: str, *, is_last: bool = True) -> str:
        _check_keys(given, ("begin", "content", "end"), ("type",), where)
        begin = json.dumps(_text(given, "begin", where))
        return f"{begin} {self._inside(given, where, is_last=is_last)}"

    def _triggered_tags(self, given: Mapping[str, Any], where: str) -> str:
        keys = ("type", "at_least_one", "stop_after_first", "excludes")
        _check_keys(given, ("triggers", "tags"), keys, where)
        for key in ("at_least_one", "excludes"):
            if given.get(key):
                raise InvalidInputError(f"{where}.{key}", given[key], "is not supported")
        stops = given.get("stop_after_first", False)
        if not isinstance(stops, bool):
            raise InvalidInputError(f"{where}.stop_after_first", stops, "must be true or false")
        triggers = _texts(given, "triggers", where)
        for one in triggers:
            if any(one != other and one in other for other in triggers):
                raise InvalidInputError(f"{where}.triggers", one, "is inside another trigger")
        bodies: dict[str, list[str]] = {trigger: [] for trigger in triggers}
        begins = []
        for i, tag in enumerate(_list(given, "tags", where)):
            place = f"{where}.tags[{i}]"
            _check_keys(tag, ("begin", "content", "end"), ("type",), place)
            begin = _text(tag, "begin", place)
            trigger = next((one for one in triggers if begin.startswith(one)), None)
            if trigger is None:
                raise InvalidInputError(f"{place}.begin", begin, "must begin with a trigger")
            begins.append(begin)
            rest = begin[len(trigger) :]
            inside = self._inside(tag, place)
            bodies[trigger].append(f"{json.dumps(rest)} {inside}" if rest else inside)
        _check_prefixes(begins, f"{where}.tags")
        segments = [
            f"{self._terminal(_until(trigger, triggers))} {self._choice(bodies[trigger])}"
            for trigger in triggers
            if bodies[trigger]
        ]
        tail = self._terminal(_without(triggers))
        segment = self._choice(segments)
        return f"{segment} | {tail}" if stops else f"{segment}* {tail}"

    def _inside(self, tag: Mapping[str, Any], where: str, *, is_last: bool = False) -> str:
        """The content and the end of a tag.

        Args:
            is_last: nothing may follow the tag.
        """
        content, end = tag["content"], _text(tag, "end", where, least=0)
        kind = _kind(content)
        if kind == "any_text":
            _check_keys(content, (), ("type",), f"{where}.content")
            if not end:
                raise InvalidInputError(f"{where}.end", end, "must not be empty after any_text")
            return self._terminal(_until(end, [end]))
        if kind == "regex":
            if not is_last:  # its terminal could continue into the text after it
                limit = "must not be regex where text may follow the tag"
                raise InvalidInputError(f"{where}.content.type", kind, limit)
            _check_keys(content, ("pattern",), ("type",), f"{where}.content")
            pattern = _regex(_text(content, "pattern", f"{where}.content"))
            return self._terminal(f"{pattern} {json.dumps(end)}" if end else pattern)
        if kind not in ("json_schema", "const_string"):
            limit = "must be json_schema, const_string, regex or any_text inside a tag"
            raise InvalidInputError(f"{where}.content.type", kind, limit)
        inside = self.format(content, f"{where}.content")
        if kind == "json_schema" and not is_last:
            schema = content["json_schema"]
            is_object = isinstance(schema, Mapping) and schema.get("type") == "object"
            if not (is_object or (end and end[0] not in _NUMBERS)):
                limit = (
                    "must begin with a character that no number has, unless the schema is an object"
                )
                raise InvalidInputError(f"{where}.end", end, limit)
        return f"{inside} {json.dumps(end)}" if end else inside

    def _choice(self, alternatives: Sequence[str]) -> str:
        name = f"rule_{len(self.lines)}"
        self.lines.append(f"{name}: {' | '.join(alternatives)}")
        return name

    def _terminal(self, pattern: str) -> str:
        name = f"TEXT_{len(self.lines)}"
        self.lines.append(f"{name}: {pattern}")
        return name


_FORMATS: Mapping[str, Callable[[_Writer, Mapping[str, Any], str], str]] = {
    "const_string": _Writer._const_string,
    "json_schema": _Writer._json_schema,
    "regex": _Writer._regex,
    "any_text": _Writer._any_text,
    "or": _Writer._or,
    "sequence": _Writer._sequence,
    "tag": _Writer._tag,
    "triggered_tags": _Writer._triggered_tags,
}


# An escaped character, and characters that end a regex of Lark.
_SPECIAL = re.compile(r"\\(?s:.)|[/\n\r]|\\\Z")
_ESCAPED = {"/": r"\x2f", r"\/": r"\x2f", "\n": r"\n", "\r": r"\r", "\\": r"\\"}


def _regex(pattern: str) -> str:
    """A regex in Lark's syntax."""
    return f"/{_SPECIAL.sub(lambda found: _ESCAPED.get(found[0], found[0]), pattern)}/"


def _any_of(texts: Sequence[str]) -> str:
    return "|".join("".join(f"\\x{{{ord(c):x}}}" for c in text) for text in texts)


def _without(texts: Sequence[str]) -> str:
    """The terminal of texts that contain none of these."""
    # Without the first part, a complement has texts that are not UTF-8.
    return f"/{_ANY}/ & ~/{_ANY}({_any_of(texts)}){_ANY}/" if texts else f"/{_ANY}/"


def _until(end: str, ends: Sequence[str]) -> str:
    """The terminal of texts whose first occurrence of one of ``ends`` is ``end``, at their end."""
    return f"/{_ANY}({_any_of([end])})/ & ~/{_ANY}({_any_of(ends)})(?s:.+)/"


def _kind(given: Any) -> str:
    kind = given.get("type") if isinstance(given, Mapping) else None
    return kind if isinstance(kind, str) else ""


def _check_keys(given: Any, needed: Sequence[str], others: Sequence[str], where: str) -> None:
    if not isinstance(given, Mapping):
        raise InvalidInputError(where, given, f"must be an object with {', '.join(needed)}")
    for key in needed:
        if key not in given:
            raise InvalidInputError(f"{where}.{key}", None, "must be given")
    for key in given:
        if key not in needed and key not in others and key != "type":
            raise InvalidInputError(f"{where}.{key}", given[key], "is not supported")


def _check_prefixes(begins: Sequence[str], where: str) -> None:
    for i, one in enumerate(begins):
        if any(i != j and other.startswith(one) for j, other in enumerate(begins)):
            raise InvalidInputError(where, one, "must not begin another alternative too")


def _list(given: Mapping[str, Any], key: str, where: str) -> Sequence[Any]:
    found: Any = given[key]
    if not is_list(found) or not found:
        raise InvalidInputError(f"{where}.{key}", found, "must be a list, not empty")
    return list(found)


def _texts(
    given: Mapping[str, Any], key: str, where: str, default: Sequence[str] | None = None
) -> list[str]:
    if default is not None and not given.get(key):
        return list(default)
    for text in _list(given, key, where):
        if not isinstance(text, str) or not text:
            raise InvalidInputError(f"{where}.{key}", text, "must be texts, not empty")
    return list(dict.fromkeys(given[key]))


def _text(given: Mapping[str, Any], key: str, where: str, least: int = 1) -> str:
    text = given[key]
    if not isinstance(text, str) or len(text) < least:
        raise InvalidInputError(f"{where}.{key}", text, "must be text" + ", not empty" * least)
    return text
