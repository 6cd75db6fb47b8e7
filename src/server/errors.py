"""Error responses, in the format of OpenAI and vLLM."""

from __future__ import annotations

import json
import logging
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from http.client import responses
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse

from ..errors import (
    ContextLengthError,
    EngineBusyError,
    EngineError,
    EngineStoppedError,
    InvalidInputError,
    PagespecError,
    RequestError,
    shortened,
)

logger = logging.getLogger("pagespec")

_TYPES = {
    400: "BadRequestError",
    401: "AuthenticationError",
    403: "PermissionDeniedError",
    404: "NotFoundError",
    429: "RateLimitError",
    500: "InternalServerError",
}
_BUSY_RETRY_S, _STOPPED_RETRY_S = 1, 5
_MAX_FAULTS = 3
_MAX_MESSAGE = 2000
# Parts of a request, which are not part of a field's name.
_PLACES = frozenset(("body", "query", "path", "header"))


class ApiError(Exception):
    """An error response.

    Attributes:
        status: HTTP status.
        type: vLLM's name for this type of error.
        param: the refused field.
        code: the status, unless a more specific code exists.
        retry_after: seconds after which to retry.
    """

    def __init__(
        self,
        status: int,
        message: str,
        type: str | None = None,
        param: str | None = None,
        code: int | str | None = None,
        retry_after: int | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.message = status, _unicode(shortened(message, _MAX_MESSAGE))
        phrase = responses.get(status, "Http")
        self.type = type or _TYPES.get(status) or phrase.replace(" ", "") + "Error"
        self.param = None if param is None else _unicode(shortened(param, _MAX_MESSAGE))
        self.retry_after = retry_after
        self.code = status if code is None else code

    @property
    def body(self) -> dict[str, Any]:
        """The JSON body, also used as the last event of a failed stream."""
        names = ("message", "type", "param", "code")
        return {"error": {name: getattr(self, name) for name in names}}

    def response(self, headers: Mapping[str, str] | None = None) -> JSONResponse:
        sent = dict(headers or {})
        if self.retry_after is not None:
            sent["Retry-After"] = str(self.retry_after)
        return JSONResponse(self.body, self.status, sent)


def api_error(error: BaseException) -> ApiError:
    """The error response for an exception. Internal details are only logged."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, ContextLengthError):
        return _context_error(error, 1)
    if isinstance(error, InvalidInputError):
        return ApiError(400, _in_json(error), param=error.field)
    if isinstance(error, EngineBusyError):
        return ApiError(429, str(error), retry_after=_BUSY_RETRY_S)
    if isinstance(error, EngineStoppedError):
        return stopping()
    if isinstance(error, RequestValidationError):
        return _validation_error(error.errors())
    if isinstance(error, HTTPException):
        reason = _reason_unread(error.__cause__) if error.status_code == 400 else None
        return ApiError(error.status_code, reason or str(error.detail))
    if isinstance(error, RequestError):
        # Caused by the request itself: a retry would fail again.
        return ApiError(400, str(error))
    if isinstance(error, (EngineError, PagespecError)):
        logger.error("a request failed: %s", error)
        return ApiError(500, "the engine failed while it computed this request; try again")
    logger.error("a request failed", exc_info=error)
    return ApiError(500, "the server failed")


@contextmanager
def context_errors(num_output: int) -> Iterator[None]:
    """Refuse prompts that are too long with vLLM's message, which clients parse.

    Args:
        num_output: number of output tokens of the request; 1 without ``max_tokens``.
    """
    try:
        yield
    except ContextLengthError as error:
        raise _context_error(error, num_output) from None


def _context_error(error: ContextLengthError, num_output: int) -> ApiError:
    about = "at least " if error.is_least else ""
    message = (
        f"This model's maximum context length is {error.max_model_len} tokens. However, you "
        f"requested {num_output} output tokens and your prompt contains {about}{error.num_tokens} "
        f"input tokens, for a total of {about}{error.num_tokens + num_output} tokens. Please "
        "reduce the length of the input prompt or the number of requested output tokens."
    )
    return ApiError(400, message, param=error.field, code="context_length_exceeded")


_JSON_WORDS = {"None": "null", "True": "true", "False": "false"}
_PYTHON_WORDS = re.compile("|".join(rf"\b{word}\b" for word in _JSON_WORDS))
_MAX_VALUE = 80


def _in_json(error: InvalidInputError) -> str:
    """The message of an error, with values as JSON writes them."""
    try:
        shown = json.dumps(error.value, ensure_ascii=False, default=_type_name)
    except (TypeError, ValueError, RecursionError):  # integers of thousands of digits
        shown = _type_name(error.value)
    limit = _PYTHON_WORDS.sub(lambda found: _JSON_WORDS[found[0]], error.limit)
    return f"{error.field} = {shortened(shown, _MAX_VALUE)}: {limit}"


def _type_name(value: object) -> str:
    return f"<{type(value).__name__}>"


def stopping() -> ApiError:
    """The error for new requests while the server shuts down."""
    return ApiError(503, "the server is shutting down", retry_after=_STOPPED_RETRY_S)


def add_error_handlers(app: FastAPI) -> None:
    """Convert every exception of an endpoint to an error response."""

    def handle(_request: Request, error: Exception) -> JSONResponse:
        headers = error.headers if isinstance(error, HTTPException) else None
        return api_error(error).response(headers)

    for kind in (ApiError, PagespecError, RequestValidationError, HTTPException):
        app.add_exception_handler(kind, handle)


def _validation_error(faults: Sequence[Any]) -> ApiError:
    """The error for FastAPI's own checks, with field and limit. Values are omitted, because they
    may be large or private."""
    described = [_described(fault) for fault in faults[:_MAX_FAULTS]]
    if len(faults) > _MAX_FAULTS:
        described.append(f"and {len(faults) - _MAX_FAULTS} more")
    return ApiError(400, "; ".join(described), param=_field(faults[0]["loc"]) if faults else None)


def _reason_unread(cause: BaseException | None) -> str | None:
    """Why a body is unreadable, which FastAPI's message omits; None if unknown."""
    if isinstance(cause, UnicodeDecodeError):
        text = f"{cause.encoding.upper()} text"
        return f"the body is not {text}: {cause.reason}, at byte {cause.start}"
    if isinstance(cause, RecursionError):
        return "the body is not valid JSON: it is nested too deeply"
    if isinstance(cause, ValueError) and "integer string conversion" in str(cause):
        limit = sys.get_int_max_str_digits()
        return f"the body has an integer with too many digits: at most {limit} are allowed"
    return None


def _described(fault: Mapping[str, Any]) -> str:
    field, kind, message = _field(fault["loc"]), fault["type"], str(fault["msg"])
    if kind == "json_invalid":
        reason = (fault.get("ctx") or {}).get("error", message)
        return f"the body is not valid JSON: {reason}, at character {fault['loc'][-1]}"
    if kind == "extra_forbidden":
        return f"{field}: is not supported"
    if kind == "missing" and field is None:
        return "a body is missing"
    return message if field is None else f"{field}: {message[:1].lower()}{message[1:]}"


def _field(place: Sequence[int | str]) -> str | None:
    """The name of a field, as the client spelled it: "messages.0.role"."""
    parts = place[1:] if place and place[0] in _PLACES else place
    if not parts or (len(parts) == 1 and isinstance(parts[0], int)):
        return None
    return ".".join(str(part) for part in parts)


def _unicode(text: str) -> str:
    """Escape lone surrogates, which JSON may contain and UTF-8 cannot encode."""
    return text.encode(errors="backslashreplace").decode()
