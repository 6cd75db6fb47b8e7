"""Errors about sampling parameters, renamed to the fields of the request."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from ...errors import InvalidInputError
from .endpoints import ChatRequest
from .fields import EngineFields, GeneratingBody

_GUIDED = ("json", "regex", "choice", "grammar")


class BodyError(InvalidInputError):
    """An error that names fields of the body already."""


@contextmanager
def client_names(body: EngineFields) -> Iterator[None]:
    """Rename the fields of errors from sampling parameters to fields of the body."""
    try:
        yield
    except BodyError:
        raise
    except InvalidInputError as error:
        raise _renamed(error, _names(body)) from None


def guided(body: GeneratingBody) -> list[str]:
    """The kinds of the ``guided_*`` fields that a body has."""
    return [name for name in _GUIDED if getattr(body, f"guided_{name}") is not None]


def _names(body: EngineFields) -> dict[str, str]:
    """Names in the body by names of the engine. A constraint's name also covers its parts."""
    names: dict[str, str] = {}
    if not isinstance(body, GeneratingBody):
        return names
    if isinstance(body, ChatRequest):
        if body.max_completion_tokens is not None:
            names["max_tokens"] = "max_completion_tokens"
        if body.top_logprobs is not None:
            names["logprobs"] = "top_logprobs"
    if body.structured_outputs:
        return names
    if found := guided(body):
        names["structured_outputs"] = f"guided_{found[0]}"
        names["structured_outputs.whitespace_pattern"] = "guided_whitespace_pattern"
    elif body.response_format is not None and body.response_format.type == "json_schema":
        names["structured_outputs"] = "response_format.json_schema.schema"
    elif body.response_format is not None and body.response_format.type == "json_object":
        names["structured_outputs"] = "response_format"
    elif isinstance(body, ChatRequest) and body.tools:
        # A choice that forces a call.
        names["structured_outputs"] = "tools"
    return names


def _renamed(error: InvalidInputError, names: Mapping[str, str]) -> InvalidInputError:
    head = error.field.partition(".")[0]
    name = names.get(error.field, names.get(head))
    if name is not None:
        return error.renamed(name)
    # "must be at most max_tokens = 3"
    limit = re.sub(r"\w+", lambda found: names.get(found[0], found[0]), error.limit)
    return error.renamed(error.field, limit)
