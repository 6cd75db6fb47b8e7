"""Parses and validates large request bodies off the event loop.

Other work that grows with a body runs on the same threads (:func:`run_for_body`).

The JSON parser in C holds the GIL for a whole body: 11 MB of lists took seconds.
Bodies above :data:`MAX_INLINE_BYTES` are parsed by the standard library's Python parser, which
yields to other threads. Runs of numbers are still parsed in C.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Coroutine
from json.decoder import JSONArray, JSONDecodeError, JSONObject  # type: ignore[attr-defined]
from json.scanner import py_make_scanner  # type: ignore[attr-defined]
from typing import Any, TypeVar

from fastapi import Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from pydantic import BaseModel, ValidationError
from starlette.exceptions import HTTPException

from ..errors import InvalidInputError
from ..serving.lanes import lane_of
from .context import ServerContext
from .errors import ApiError

# Bodies up to this size are parsed on the event loop, in about a millisecond.
MAX_INLINE_BYTES = 1 << 15
# Limit on objects, lists and fields of a body: one garbage collection scans all of them.
MAX_NUM_CONTAINERS = 1 << 17
# A thread of pure Python delays the engine's thread at each release of the GIL. So a parser pauses
# for twice its working time.
_TURN_S, _PAUSE_PER_TURN = 0.002, 2.0
_NUM_VALUES_PER_LOOK, _LONG_CHARS = 128, 1 << 16

# Limit for a text to be counted or truncated: tokenising takes some 100 bytes of memory per token.
MAX_TEXT_BYTES = 2 << 20
# Maximum bytes per token of ordinary text.
_BYTES_PER_TOKEN = 8

_T = TypeVar("_T")
_Model = TypeVar("_Model", bound=BaseModel)

_NUMBERS = re.compile(r"[-0-9,\s]{512,65536}")
_SPACE = re.compile(r"[ \t\n\r]*")


class BodyRoute(APIRoute):
    """A route that reads large bodies on another thread."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()
        field = self.body_field
        model = None if field is None else field.field_info.annotation
        if not (isinstance(model, type) and issubclass(model, BaseModel)):
            return handle

        async def read_and_handle(request: Request) -> Response:
            body = await request.body()
            if len(body) > MAX_INLINE_BYTES:
                # FastAPI takes the parsed body from here; a model instance is valid.
                request._json = await lane_of("body", len(body)).run(read_body, body, model)
            return await handle(request)

        return read_and_handle


async def run_for_body(num_bytes: int, function: Callable[..., _T], *arguments: Any) -> _T:
    """Call a function whose time grows with a body: inline for a small body, otherwise on the
    thread for large bodies. Raises what ``function`` raises.

    Args:
        num_bytes: size of the body.
    """
    if num_bytes <= MAX_INLINE_BYTES:
        return function(*arguments)
    return await lane_of("body", num_bytes).run(function, *arguments)


def require_bounded(
    field: str, num_bytes: int, truncate: int | None, context: ServerContext
) -> None:
    """Refuse a long text that is to be counted or truncated: the context does not bound its length.

    Args:
        num_bytes: size of the text, or somewhat less.
        truncate: number of tokens to which it is truncated; None: a text that does not fit in the
            context is refused later.

    Raises:
        InvalidInputError: the text is too long.
    """
    if truncate is None:
        return
    most = max(MAX_TEXT_BYTES, _BYTES_PER_TOKEN * context.engine.llm.max_model_len)
    if num_bytes > most:
        limit = f"must be at most {most} bytes of text to be cut to its last tokens, or counted"
        raise InvalidInputError(field, f"{num_bytes} bytes", limit)


def read_body(body: bytes, model: type[_Model]) -> _Model:
    """A body's value, as FastAPI would read it. Raises what the two steps raise."""
    return validated(read_json(body), model)


def read_json(body: bytes) -> Any:
    """
    Raises:
        ApiError, HTTPException, RequestValidationError: it is not JSON.
    """
    try:
        return parse(body)
    except JSONDecodeError as error:
        fault = {"type": "json_invalid", "loc": ("body", error.pos), "msg": "JSON decode error",
                 "input": {}, "ctx": {"error": error.msg}}  # fmt: skip
        raise RequestValidationError([fault]) from error
    except ApiError:
        raise
    except Exception as error:
        raise HTTPException(400, "There was an error parsing the body") from error


def validated(value: Any, model: type[_Model]) -> _Model:
    """
    Raises:
        RequestValidationError: it does not match ``model``.
    """
    try:
        return model.model_validate(value, from_attributes=True)
    except ValidationError as error:
        faults = error.errors(include_url=False, include_context=False, include_input=False)
        raise RequestValidationError(
            [{**fault, "loc": ("body", *fault["loc"])} for fault in faults]
        ) from None


def parse(body: bytes) -> Any:
    """Parse like ``json.loads``, in steps.

    Raises:
        JSONDecodeError, UnicodeDecodeError, RecursionError, ValueError: as ``json.loads``.
        ApiError: it has more than :data:`MAX_NUM_CONTAINERS` objects, lists and fields.
    """
    return _Decoder().decode(body.decode(json.detect_encoding(body), "surrogatepass"))


class _Decoder(json.JSONDecoder):
    def __init__(self) -> None:
        super().__init__()
        self._num_containers = self._num_values = 0
        self._turn_began = time.perf_counter()
        self.parse_object = self._object
        self.parse_array = self._array
        self._scan_value = self.scan_once = py_make_scanner(self)

    def _scan(self, text: str, begin: int) -> tuple[Any, int]:
        """Scan a nested value."""
        self._num_values += 1
        if self._num_values % _NUM_VALUES_PER_LOOK == 0:
            self._pause()
        found: tuple[Any, int] = self._scan_value(text, begin)
        if found[1] - begin > _LONG_CHARS:
            self._pause()
        return found

    def _scan_field(self, text: str, begin: int) -> tuple[Any, int]:
        self._count()
        return self._scan(text, begin)

    def _pause(self) -> None:
        worked_s = time.perf_counter() - self._turn_began
        if worked_s >= _TURN_S:
            time.sleep(_PAUSE_PER_TURN * worked_s)
            self._turn_began = time.perf_counter()

    def _count(self) -> None:
        self._num_containers += 1
        if self._num_containers > MAX_NUM_CONTAINERS:
            raise ApiError(
                400, f"the body has more than {MAX_NUM_CONTAINERS} objects, lists and fields"
            )

    def _object(self, begin: tuple[str, int], strict: bool, _: Any, *rest: Any) -> Any:
        self._count()
        return JSONObject(begin, strict, self._scan_field, *rest)

    def _array(self, begin: tuple[str, int], _: Any) -> tuple[list[Any], int]:
        self._count()
        text, end = begin
        values: list[Any] = []
        while (found := _NUMBERS.match(text, end)) is not None:
            comma = text.rfind(",", end, found.end())
            if comma < 0 or not text[end:comma].strip():
                break
            try:
                values += json.loads(f"[{text[end:comma]}]")
            except ValueError:
                break  # JSONArray reports the error with its position
            end = comma + 1
            self._pause()
        if values:
            place = _SPACE.match(text, end).end()  # type: ignore[union-attr]
            if text[place : place + 1] == "]":
                raise JSONDecodeError("Expecting value", text, place)
        rest, end = JSONArray((text, end), self._scan)
        return values + rest if values else rest, end
