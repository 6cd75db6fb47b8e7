"""The syntaxes of tool calls: what stands between the delimiters of a call.

A reader is a generator over a :class:`View`: it yields where the text so far does not decide, and
is resumed when there is more. So a call is read once, however its text is cut. It returns the calls
and the end of their text, or None as soon as the text is no call.
"""

from __future__ import annotations

import ast
import json
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple, Protocol, TypeVar

from .values import json_text, parameters_of, typed

_T = TypeVar("_T")
Waiting = Generator[None, None, _T]


class View(Protocol):
    """The text of an answer, from the call's opening delimiter on.

    Attributes:
        text: what there is so far.
        is_whole: whether that is all.
        tools: whose schemas give arguments their types.
    """

    text: str
    is_whole: bool
    tools: Sequence[Mapping[str, Any]]


class Call(NamedTuple):
    """
    Attributes:
        arguments: the text of a JSON object.
        id: as the model wrote it; None if it wrote none.
    """

    name: str
    arguments: str
    id: str | None = None


class Found(NamedTuple):
    """
    Attributes:
        calls: empty if the text is well formed, but no call.
        end: behind the last character of the closing delimiter.
    """

    calls: list[Call]
    end: int


class Syntax(Protocol):
    """How calls are written. ``close`` ends them; empty: what is no more of them does."""

    def read(self, view: View, place: int, close: str) -> Waiting[Found | None]:
        """
        Args:
            place: behind the opening delimiter.
        """


@cache
def _compiled(pattern: str) -> Any:
    import regex  # a library of transformers; matches text of which more may come

    return regex.compile(pattern, regex.DOTALL)


def _expect(view: View, pattern: str, place: int) -> Waiting[Any]:
    """The match of a pattern at a place, or None. A pattern must end in what cannot go on."""
    compiled = _compiled(pattern)
    while True:
        match = compiled.match(view.text, place, partial=not view.is_whole)
        if match is None or not match.partial:
            return match
        yield


def _skip(view: View, place: int, blanks: str) -> Waiting[int]:
    """The place of the next character that is none of these, or the end of the text."""
    while True:
        while place < len(view.text) and view.text[place] in blanks:
            place += 1
        if place < len(view.text) or view.is_whole:
            return place
        yield


def _escape(text: str) -> str:
    import re

    return re.escape(text)


# JSON -------------------------------------------------------------------------------------------

_BLANKS = " \t\n\r"


def _json_end(view: View, place: int) -> Waiting[int]:
    """The end of the bracketed value that begins at ``place``; -1 if it is not well formed."""
    depth = 0
    is_value = False  # whether a value has just ended
    while True:
        place = yield from _skip(view, place, _BLANKS)
        if place == len(view.text):
            return -1
        char = view.text[place]
        place += 1
        if char == '"':
            place = yield from _string_end(view, place, char)
            if is_value or place < 0:
                return -1
            is_value = True
        elif char in "{[":
            if is_value:
                return -1
            depth += 1
        elif char in "}]":
            depth -= 1
            is_value = True
            if depth <= 0:
                return place if depth == 0 else -1
        elif char in ",:":
            if not is_value:
                return -1
            is_value = False
        else:
            match = yield from _expect(view, r"[-+.\w]+(?=[^-+.\w])", place - 1)
            if match is None or is_value:
                return -1
            place, is_value = match.end(), True


def _string_end(view: View, place: int, quote: str) -> Waiting[int]:
    """Behind the closing quote of a string; -1 if a control character stands in it."""
    stop = _compiled(rf"[{quote}\\\x00-\x1f]")
    while True:
        match = stop.search(view.text, place)
        if match is None:
            place = len(view.text)
        elif match.group() == quote:
            return int(match.end())
        elif match.group() != "\\":
            return -1
        elif match.end() < len(view.text):
            place = match.end() + 1
            continue
        else:
            place = match.start()
        if view.is_whole:
            return -1
        yield


def _flat(value: Any) -> Iterator[Any]:
    if isinstance(value, list):
        for item in value:
            yield from _flat(item)
    else:
        yield value


def _arguments_text(arguments: Any) -> str:
    """
    Raises:
        ValueError, TypeError: they are no object.
    """
    if isinstance(arguments, str):
        arguments = json.loads(arguments)
    if not isinstance(arguments, dict):
        raise TypeError("arguments are an object")
    return json_text(arguments)


def _call(name: Any, arguments: Any, call_id: Any = None) -> Call:
    """
    Raises:
        ValueError, TypeError: it is no call.
    """
    if not isinstance(name, str) or not name:
        raise TypeError("a call has a name")
    name.encode()
    written = call_id if isinstance(call_id, str) and call_id else None
    return Call(name, _arguments_text(arguments), written)


def _calls(make: Callable[[], list[Call]]) -> list[Call]:
    """The calls; none if anything is wrong with one: a model may write any values."""
    try:
        return make()
    except (ValueError, TypeError, LookupError, SyntaxError, RecursionError, MemoryError):
        return []


@dataclass(frozen=True)
class JsonCalls:
    """JSON objects with a name and arguments, or lists of them; between them may be white space,
    commas and semicolons.

    Attributes:
        names, arguments: keys of which an object has one.
        prefix: what stands before the first object and is part of it: the opening delimiter of
            calls that have none of their own.
    """

    names: tuple[str, ...] = ("name",)
    arguments: tuple[str, ...] = ("arguments", "parameters")
    prefix: str = ""

    def read(self, view: View, place: int, close: str) -> Waiting[Found | None]:
        place -= len(self.prefix)
        if self.prefix:  # other objects are told apart by their first key
            keys = "|".join((*self.names, *self.arguments, "type", "function"))
            match = yield from _expect(view, rf'\s*(?:\[\s*)*\{{\s*"(?:{keys})"', place)
            if match is None:
                return None
        values: list[Any] = []
        end = place
        while True:
            place = yield from _skip(view, place, _BLANKS + ",;")
            if close:
                match = yield from _expect(view, rf"[{{\[]|{_escape(close)}", place)
                if match is None:
                    return None
                if match.group() == close:
                    end = match.end()
                    break
            elif view.text[place : place + 1] not in ("{", "["):
                break
            end = yield from _json_end(view, place)
            if end < 0:
                return None
            values.append(view.text[place:end])
            place = end
        if not values and not close:
            return None
        calls = _calls(lambda: [self._call(v) for text in values for v in _flat(json.loads(text))])
        if self.prefix and not {call.name for call in calls} <= _names(view):
            return None
        return Found(calls, end)

    def _call(self, value: Any) -> Call:
        if not isinstance(value, dict):
            raise TypeError("a call is an object")
        if isinstance(value.get("function"), dict):
            value = {**value, **value["function"]}
        name = next((value[key] for key in self.names if key in value), None)
        arguments: Any = next((value[key] for key in self.arguments if key in value), {})
        return _call(name, arguments, value.get("id"))


def _names(view: View) -> set[str]:
    return {str(tool["function"]["name"]) for tool in view.tools}


@dataclass(frozen=True)
class NamedJson:
    """A header with the name, then a JSON object of arguments.

    Attributes:
        header: a pattern with a group ``name``, perhaps ``id``.
        tail: text between the object and the closing delimiter, white space left aside.
    """

    header: str
    tail: str = ""

    def read(self, view: View, place: int, close: str) -> Waiting[Found | None]:
        header = yield from _expect(view, self.header, place)
        if header is None:
            return None
        begin = yield from _skip(view, header.end(), _BLANKS)
        if view.text[begin : begin + 1] != "{":
            return None
        end = yield from _json_end(view, begin)
        if end < 0:
            return None
        text = view.text[begin:end]
        if self.tail + close:
            tail = rf"\s*{_escape(self.tail)}\s*{_escape(close)}"
            match = yield from _expect(view, tail, end)
            if match is None:
                return None
            end = match.end()
        groups = header.groupdict()
        make = lambda: [_call(groups["name"], json.loads(text), groups.get("id"))]  # noqa: E731
        return Found(_calls(make), end)


# Tags -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class TaggedCalls:
    """A tag with the name, then one element for each argument, whose value is written as it is.

    A value ends at the closing tag of its element, if what may follow stands behind it: so a value
    may have such tags in it. The type of a value is that of the tool's schema.

    Attributes:
        name: a pattern with a group ``name``, which opens a function.
        key: a pattern with a group ``key``, which opens an argument; a group ``text`` of "true" or
            "false" says whether its value is text.
        value_close: the text that closes an argument.
        close: the text that closes a function; empty: the calls' delimiter does.
        pad: the text that the template puts around each value.
        repeats: whether another function may follow before the calls' delimiter.
    """

    name: str
    key: str
    value_close: str
    close: str = ""
    pad: str = ""
    repeats: bool = False

    def read(self, view: View, place: int, close: str) -> Waiting[Found | None]:
        calls: list[Call] = []
        closes = rf"\s*{_escape(self.close)}\s*" if self.close else r"\s*"
        more = f"|{_bare(self.name)}" if self.repeats else ""
        end = f"{closes}(?:{_escape(close)}{more})"
        following = rf"{_bare(self.key)}|{end}"
        while True:
            header = yield from _expect(view, self.name, place)
            if header is None:
                return None
            place = header.end()
            parameters = parameters_of(view.tools, header.group("name"))
            arguments: dict[str, Any] = {}
            while True:
                match = yield from _expect(view, rf"{self.key}|(?P<end>{end})", place)
                if match is None:
                    return None
                if match.group("end") is not None:
                    break
                place = yield from self._value_end(view, match.end(), following)
                if place < 0:
                    return None
                raw = self._unpadded(view.text[match.end() : place])
                arguments[match.group("key")] = self._value(match, raw, parameters)
                place += len(self.value_close)
            name = header.group("name")
            made = _calls(lambda name=name, given=arguments: [_call(name, given)])  # type: ignore[misc]
            if not made:
                return None
            calls += made
            # The end of a function, and the beginning of the next or the end of all.
            match = yield from _expect(view, closes + f"(?P<all>{_escape(close)})?", place)
            place = match.end()
            if match.group("all") is not None:
                return Found(calls, place)

    def _value_end(self, view: View, place: int, following: str) -> Waiting[int]:
        """Where the closing tag of a value begins; -1 if there is none."""
        while True:
            found = view.text.find(self.value_close, place)
            if found >= 0:
                match = yield from _expect(view, following, found + len(self.value_close))
                if match is not None:
                    return found
                place = found + 1
            elif view.is_whole:
                return -1
            else:
                place = max(place, len(view.text) - len(self.value_close) + 1)
                yield

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
    """The pattern without names of groups, to stand in another one twice."""
    import re

    return re.sub(r"\(\?P<\w+>", "(?:", pattern)


# Python -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class PythonCalls:
    """A list of calls in Python: ``[f(a=1), g(b="x")]``.

    Attributes:
        prefix: as of :class:`JsonCalls`.
    """

    prefix: str = ""

    def read(self, view: View, place: int, close: str) -> Waiting[Found | None]:
        place -= len(self.prefix)
        begin = yield from _expect(view, r"\s*(?P<list>\[)\s*[A-Za-z_][\w.]*\s*\(", place)
        if begin is None:
            return None
        place = begin.start("list")
        end = yield from self._end(view, place)
        if end < 0:
            return None
        text = view.text[place:end]
        if close:
            match = yield from _expect(view, rf"\s*{_escape(close)}", end)
            if match is None:
                return None
            end = match.end()
        calls = _calls(lambda: [self._call(node) for node in self._nodes(text)])
        if self.prefix and not {call.name for call in calls} <= _names(view):
            return None
        return Found(calls, end)

    @staticmethod
    def _end(view: View, place: int) -> Waiting[int]:
        """The end of the brackets that open at ``place``; -1 if a string in them has none."""
        depth = 0
        mark = _compiled("[\"'()\\[\\]{}]")
        while True:
            match = mark.search(view.text, place)
            if match is None:
                if view.is_whole:
                    return -1
                place = len(view.text)
                yield
                continue
            place = match.end()
            if match.group() in "\"'":
                place = yield from _string_end(view, place, match.group())
                if place < 0:
                    return -1
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
        return _call(ast.unparse(node.func), arguments)


def _literal(node: ast.expr) -> Any:
    """A value in Python, in which JSON's words may stand as well."""
    words = {"true": True, "false": False, "null": None}
    for part in ast.walk(node):
        if isinstance(part, ast.Name) and part.id not in words:
            raise TypeError(f"{part.id} is no value")
    if isinstance(node, ast.Name):
        return words[node.id]
    if isinstance(node, ast.List):
        return [_literal(item) for item in node.elts]
    if isinstance(node, ast.Dict):
        keys = [ast.literal_eval(key) for key in node.keys if key is not None]
        if not all(isinstance(key, str) for key in keys):
            raise TypeError("keys are text")
        return dict(zip(keys, map(_literal, node.values), strict=True))
    return ast.literal_eval(node)


# Gemma ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class GemmaCalls:
    """``call:NAME{key:value}``: keys without quotes, strings between ``quote``."""

    quote: str

    def read(self, view: View, place: int, close: str) -> Waiting[Found | None]:
        header = yield from _expect(view, r"call:(?P<name>[^{<\s]+)(?=\{)", place)
        if header is None:
            return None
        marks = _compiled(f"{_escape(self.quote)}|{_escape(close)}")
        place, is_text = header.end(), False
        while True:  # the closing delimiter outside of strings
            match = marks.search(view.text, place)
            if match is None:
                if view.is_whole:
                    return None
                place = max(place, len(view.text) - max(len(self.quote), len(close)) + 1)
                yield
                continue
            place = match.end()
            if match.group() == self.quote:
                is_text = not is_text
            elif not is_text:
                break
        text = view.text[header.end() : match.start()]
        return Found(_calls(lambda: [_call(header.group("name"), self._object(text))]), place)

    def _object(self, text: str) -> dict[str, Any]:
        value, end = self._value(text, 0)
        if end != len(text) or not isinstance(value, dict):
            raise ValueError("arguments are one object")
        return value

    def _value(self, text: str, place: int) -> tuple[Any, int]:
        if text.startswith(self.quote, place):
            begin = place + len(self.quote)
            end = text.index(self.quote, begin)
            return text[begin:end], end + len(self.quote)
        if text.startswith(("{", "["), place):
            return self._items(text, place)
        match = _compiled(r"[-+.\w]+").match(text, place)
        if match is None:
            raise ValueError("no value")
        word = {"True": "true", "False": "false", "None": "null"}.get(match.group(), match.group())
        return json.loads(word), match.end()

    def _items(self, text: str, place: int) -> tuple[Any, int]:
        is_object = text[place] == "{"
        close = "}" if is_object else "]"
        items: list[Any] = []
        place += 1
        while not text.startswith(close, place):
            if items:
                if not text.startswith(",", place):
                    raise ValueError("no comma")
                place += 1
            key: Any = None
            if is_object:
                if text.startswith(self.quote, place):
                    key, place = self._value(text, place)
                else:
                    end = text.index(":", place)
                    key, place = text[place:end], end
                if not text.startswith(":", place):
                    raise ValueError("no colon")
                place += 1
            value, place = self._value(text, place)
            items.append((key, value) if is_object else value)
        return (dict(items) if is_object else items), place + 1
