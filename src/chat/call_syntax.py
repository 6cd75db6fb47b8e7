"""Syntaxes of tool calls, between the delimiters of a call.

A reader is a generator over a :class:`View`. It yields while the text is undecided, and is resumed
with more text. So a call is read only once, however its text is split. It returns the calls and the
end of their text, and raises :class:`NoCall` as soon as the text cannot be a call.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple, Protocol, TypeVar

from .values import PYTHON_WORDS, json_text, parameters_of, typed

_T = TypeVar("_T")
Waiting = Generator[None, None, _T]


class NoCall(Exception):
    """The text is not a tool call."""


class View(Protocol):
    """The text of an answer, from the call's opening delimiter on.

    Attributes:
        text: the text so far.
        is_whole: the text is complete.
        tools: their schemas determine the types of arguments.
    """

    text: str
    is_whole: bool
    tools: Sequence[Mapping[str, Any]]


class Call(NamedTuple):
    """
    Attributes:
        arguments: the text of a JSON object.
        id: as written by the model; None if it wrote none.
    """

    name: str
    arguments: str
    id: str | None = None


class Found(NamedTuple):
    """
    Attributes:
        calls: empty if the text is well formed, but not a call.
        end: offset after the closing delimiter.
    """

    calls: list[Call]
    end: int


class Syntax(Protocol):
    """A syntax of calls. ``close`` ends them; if it is empty, the first text that is not a call."""

    def read(self, view: View, place: int, close: str) -> Waiting[Found]:
        """
        Args:
            place: offset after the opening delimiter.

        Raises:
            NoCall: the text is not a call.
        """


@cache
def _compiled(pattern: str) -> Any:
    import regex  # a dependency of transformers; supports partial matches

    return regex.compile(pattern, regex.DOTALL)


def _match(view: View, pattern: str, place: int) -> Waiting[Any]:
    """The match of a pattern at an offset, or None. More text must not lengthen a match."""
    compiled = _compiled(pattern)
    while True:
        match = compiled.match(view.text, place, partial=not view.is_whole)
        if match is None or not match.partial:
            return match
        yield


def _expect(view: View, pattern: str, place: int) -> Waiting[Any]:
    """The match of a pattern at an offset.

    Raises:
        NoCall: the pattern does not match.
    """
    match = yield from _match(view, pattern, place)
    if match is None:
        raise NoCall
    return match


def _search(view: View, pattern: str, place: int, length: int) -> Waiting[Any]:
    """The next match of a pattern whose matches have at most ``length`` characters.

    Raises:
        NoCall: there is no match.
    """
    compiled = _compiled(pattern)
    while (match := compiled.search(view.text, place)) is None:
        if view.is_whole:
            raise NoCall
        place = max(place, len(view.text) - length + 1)
        yield
    return match


def _skip(view: View, place: int, blanks: str) -> Waiting[int]:
    """The offset of the next character that is not in ``blanks``, or the end of the text."""
    while True:
        while place < len(view.text) and view.text[place] in blanks:
            place += 1
        if place < len(view.text) or view.is_whole:
            return place
        yield


# JSON -------------------------------------------------------------------------------------------

_BLANKS = " \t\n\r"


def _json_end(view: View, place: int) -> Waiting[int]:
    """The end of the bracketed value that begins at ``place``.

    Raises:
        NoCall: it is not well formed.
    """
    depth = 0
    is_value = False  # whether a value has just ended
    while True:
        place = yield from _skip(view, place, _BLANKS)
        if place == len(view.text):
            raise NoCall
        char = view.text[place]
        place += 1
        if char == '"':
            place = yield from _string_end(view, place, char)
            if is_value:
                raise NoCall
            is_value = True
        elif char in "{[":
            if is_value:
                raise NoCall
            depth += 1
        elif char in "}]":
            depth -= 1
            is_value = True
            if depth < 0:
                raise NoCall
            if depth == 0:
                return place
        elif char in ",:":
            if not is_value:
                raise NoCall
            is_value = False
        else:
            match = yield from _expect(view, r"[-+.\w]+(?=[^-+.\w])", place - 1)
            if is_value:
                raise NoCall
            place, is_value = match.end(), True


def _string_end(view: View, place: int, quote: str) -> Waiting[int]:
    """The offset after the closing quote of a string.

    Raises:
        NoCall: the string contains a control character, or is not closed.
    """
    while True:
        match = yield from _search(view, rf"{quote}|\\.|[\x00-\x1f]", place, 2)
        place = match.end()
        if match.group() == quote:
            return place
        if match.group()[0] != "\\":
            raise NoCall


def flat(value: Any) -> Iterator[Any]:
    """The items of nested lists, in order."""
    if isinstance(value, list):
        for item in value:
            yield from flat(item)
    else:
        yield value


def _arguments_text(arguments: Any) -> str:
    """
    Raises:
        ValueError, TypeError: they are not an object.
    """
    if isinstance(arguments, str):
        arguments = json.loads(arguments)
    if not isinstance(arguments, dict):
        raise TypeError("arguments are an object")
    return json_text(arguments)


def make_call(name: Any, arguments: Any, call_id: Any = None) -> Call:
    """
    Raises:
        ValueError, TypeError: the values do not form a call.
    """
    if not isinstance(name, str) or not name:
        raise TypeError("a call has a name")
    name.encode()
    written = call_id if isinstance(call_id, str) and call_id else None
    return Call(name, _arguments_text(arguments), written)


def _calls(make: Callable[[], list[Call]]) -> list[Call]:
    """The calls; empty if any of them is invalid, since a model may write any values."""
    try:
        return make()
    except (ValueError, TypeError, LookupError, SyntaxError, RecursionError, MemoryError):
        return []


@dataclass(frozen=True)
class JsonCalls:
    """JSON objects with a name and arguments, or lists of them, separated by white space, commas
    and semicolons.

    Attributes:
        names, arguments: keys; an object has one of each.
        prefix: an opening delimiter that is also the beginning of the first object.
    """

    names: tuple[str, ...] = ("name",)
    arguments: tuple[str, ...] = ("arguments", "parameters")
    prefix: str = ""

    def read(self, view: View, place: int, close: str) -> Waiting[Found]:
        place -= len(self.prefix)
        if self.prefix:  # other objects begin with other keys
            keys = "|".join((*self.names, *self.arguments, "type", "function"))
            yield from _expect(view, rf'\s*(?:\[\s*)*\{{\s*"(?:{keys})"', place)
        values: list[Any] = []
        end = place
        while True:
            place = yield from _skip(view, place, _BLANKS + ",;")
            if close:
                match = yield from _expect(view, rf"[{{\[]|{re.escape(close)}", place)
                if match.group() == close:
                    end = match.end()
                    break
            elif view.text[place : place + 1] not in ("{", "["):
                break
            end = yield from _json_end(view, place)
            values.append(view.text[place:end])
            place = end
        if not values and not close:
            raise NoCall
        calls = _calls(lambda: [self._call(v) for text in values for v in flat(json.loads(text))])
        if self.prefix and not {call.name for call in calls} <= _names(view):
            raise NoCall
        return Found(calls, end)

    def _call(self, value: Any) -> Call:
        if not isinstance(value, dict):
            raise TypeError("a call is an object")
        if isinstance(value.get("function"), dict):
            value = {**value, **value["function"]}
        name = next((value[key] for key in self.names if key in value), None)
        arguments: Any = next((value[key] for key in self.arguments if key in value), {})
        return make_call(name, arguments, value.get("id"))


def _names(view: View) -> set[str]:
    return {str(tool["function"]["name"]) for tool in view.tools}


@dataclass(frozen=True)
class NamedJson:
    """A header with the name, then a JSON object of arguments.

    Attributes:
        header: a regex with a group ``name``, and optionally ``id``.
        tail: text between the object and the closing delimiter, apart from white space.
    """

    header: str
    tail: str = ""

    def read(self, view: View, place: int, close: str) -> Waiting[Found]:
        header = yield from _expect(view, self.header, place)
        begin = yield from _skip(view, header.end(), _BLANKS)
        if view.text[begin : begin + 1] != "{":
            raise NoCall
        end = yield from _json_end(view, begin)
        text = view.text[begin:end]
        if self.tail + close:
            tail = rf"\s*{re.escape(self.tail)}\s*{re.escape(close)}"
            end = (yield from _expect(view, tail, end)).end()
        groups = header.groupdict()
        make = lambda: [make_call(groups["name"], json.loads(text), groups.get("id"))]  # noqa: E731
        return Found(_calls(make), end)


# Tags -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class TaggedCalls:
    """A tag with the name, then one element per argument, whose value is written without quotes.

    A value ends at the closing tag of its element if valid text follows it, so a value may contain
    such tags. The tool's schema determines the type of a value.

    Attributes:
        name: a regex with a group ``name``, which opens a function.
        key: a regex with a group ``key``, which opens an argument; a group ``text`` that matches
            "true" or "false" says whether the value is a string.
        value_close: the text that closes an argument.
        close: the text that closes a function; empty: the calls' delimiter closes it.
        pad: text that the template writes around each value.
        repeats: whether another function may follow before the calls' delimiter.
    """

    name: str
    key: str
    value_close: str
    close: str = ""
    pad: str = ""
    repeats: bool = False

    def read(self, view: View, place: int, close: str) -> Waiting[Found]:
        calls: list[Call] = []
        closes = rf"\s*{re.escape(self.close)}\s*" if self.close else r"\s*"
        more = f"|{_bare(self.name)}" if self.repeats else ""
        end = f"{closes}(?:{re.escape(close)}{more})"
        following = rf"{_bare(self.key)}|{end}"
        while True:
            header = yield from _expect(view, self.name, place)
            place = header.end()
            parameters = parameters_of(view.tools, header.group("name"))
            arguments: dict[str, Any] = {}
            while True:
                match = yield from _expect(view, rf"{self.key}|(?P<end>{end})", place)
                if match.group("end") is not None:
                    break
                place = yield from self._value_end(view, match.end(), following)
                raw = self._unpadded(view.text[match.end() : place])
                arguments[match.group("key")] = self._value(match, raw, parameters)
                place += len(self.value_close)
            name = header.group("name")
            made = _calls(lambda name=name, given=arguments: [make_call(name, given)])  # type: ignore[misc]
            if not made:
                raise NoCall
            calls += made
            # The end of a function, then the next function or the end of all calls.
            match = yield from _expect(view, closes + f"(?P<all>{re.escape(close)})?", place)
            place = match.end()
            if match.group("all") is not None:
                return Found(calls, place)

    def _value_end(self, view: View, place: int, following: str) -> Waiting[int]:
        """The offset of the closing tag of a value.

        Raises:
            NoCall: there is none.
        """
        while True:
            tag = re.escape(self.value_close)
            close = yield from _search(view, tag, place, len(self.value_close))
            match = yield from _match(view, following, close.end())
            if match is not None:
                return int(close.start())
            place = close.start() + 1

    def _unpadded(self, raw: str) -> str:
        return raw.removeprefix(self.pad).removesuffix(self.pad) if self.pad else raw

    @staticmethod
    def _value(match: Any, raw: str, parameters: Mapping[str, Any]) -> Any:
        is_text = match.groupdict().get("text")
        if is_text == "true":
            return raw
        if is_text == "false":
            (value, *_) = _calls(lambda: [json.loads(raw)]) or [raw]  # type: ignore[list-item]
            return value
        return typed(raw, match.group("key"), parameters)


@cache
def _bare(pattern: str) -> str:
    """The regex without group names, so that it can be used twice in another regex."""
    return re.sub(r"\(\?P<\w+>", "(?:", pattern)


# Python -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class PythonCalls:
    """A Python list of calls: ``[f(a=1), g(b="x")]``.

    Attributes:
        prefix: see :class:`JsonCalls`.
    """

    prefix: str = ""

    def read(self, view: View, place: int, close: str) -> Waiting[Found]:
        place -= len(self.prefix)
        begin = yield from _expect(view, r"\s*(?P<list>\[)\s*[A-Za-z_][\w.]*\s*\(", place)
        place = begin.start("list")
        end = yield from self._end(view, place)
        text = view.text[place:end]
        if close:
            end = (yield from _expect(view, rf"\s*{re.escape(close)}", end)).end()
        calls = _calls(lambda: [self._call(node) for node in self._nodes(text)])
        if self.prefix and not {call.name for call in calls} <= _names(view):
            raise NoCall
        return Found(calls, end)

    @staticmethod
    def _end(view: View, place: int) -> Waiting[int]:
        """The end of the brackets that open at ``place``.

        Raises:
            NoCall: the brackets or a string inside are not closed.
        """
        depth = 0
        while True:
            match = yield from _search(view, "[\"'()\\[\\]{}]", place, 1)
            place = match.end()
            if match.group() in "\"'":
                place = yield from _string_end(view, place, match.group())
            else:
                depth += 1 if match.group() in "([{" else -1
                if depth == 0:
                    return place

    @staticmethod
    def _nodes(text: str) -> list[ast.expr]:
        tree = ast.parse(text, mode="eval").body
        if not isinstance(tree, ast.List):
            raise TypeError("calls are a list")
        return tree.elts

    @staticmethod
    def _call(node: ast.expr) -> Call:
        if not isinstance(node, ast.Call) or node.args:
            raise TypeError("a call has named arguments only")
        arguments = {str(word.arg): _literal(word.value) for word in node.keywords}
        if None in (word.arg for word in node.keywords):
            raise TypeError("a call has named arguments only")
        return make_call(ast.unparse(node.func), arguments)


class _Words(ast.NodeTransformer):
    """Replaces JSON's literals (true, false, null) with Python's values."""

    def visit_Name(self, node: ast.Name) -> ast.Constant:
        return ast.Constant({"true": True, "false": False, "null": None}[node.id])


def _literal(node: ast.expr) -> Any:
    """A value in Python syntax, which may contain JSON's literals."""
    keys = (key for part in ast.walk(node) if isinstance(part, ast.Dict) for key in part.keys)
    if not all(isinstance(key, ast.Constant) and isinstance(key.value, str) for key in keys):
        raise TypeError("keys are text")
    return ast.literal_eval(_Words().visit(node))


# Gemma ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class GemmaCalls:
    """``call:NAME{key:value}``: keys without quotes, strings enclosed in ``quote``."""

    quote: str

    def read(self, view: View, place: int, close: str) -> Waiting[Found]:
        header = yield from _expect(view, r"call:(?P<name>[^{<\s]+)(?=\{)", place)
        marks = f"{re.escape(self.quote)}|{re.escape(close)}"
        place, is_text, found = header.end(), False, ""
        while found != close or is_text:
            match = yield from _search(view, marks, place, max(len(self.quote), len(close)))
            place, found = match.end(), match.group()
            is_text ^= found == self.quote
        text = view.text[header.end() : match.start()]
        make = lambda: [make_call(header.group("name"), self._json(text))]  # noqa: E731
        return Found(_calls(make), place)

    def _json(self, text: str) -> str:
        parts = text.split(self.quote)
        parts[1::2] = map(json.dumps, parts[1::2])
        parts[::2] = [re.sub(_UNQUOTED, _quoted, part) for part in parts[::2]]
        return "".join(parts)


# A key with the delimiter before it, or a Python literal.
_UNQUOTED = r"([{,])([^:{}\[\],]*)(?=:)|\b(?:True|False|None)\b"


def _quoted(match: re.Match[str]) -> str:
    return match[1] + json.dumps(match[2]) if match[1] else PYTHON_WORDS[match[0]]
