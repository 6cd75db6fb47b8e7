"""Steps shared by all generating endpoints: reading common fields, submitting prompts."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from fastapi import Request

from ..engine.outputs import CompletionOutput
from ..engine.sampling_params import SamplingParams
from ..errors import InvalidInputError
from ..serving.generation import AnswerDelta, Generation
from .basic import check_model
from .context import ServerContext, owner_of, request_id_of, salt_of
from .errors import context_errors
from .protocol.endpoints import client_names
from .protocol.fields import EngineFields

# Field names in the engine's errors about one prompt.
_MARKS = ("prompt.priority", "prompt.cache_salt")
_Body = TypeVar("_Body", bound=EngineFields)

Answer = AnswerDelta | CompletionOutput
"""A whole answer or a delta; both have the same fields."""


@dataclass(frozen=True, slots=True)
class Call(Generic[_Body]):
    """One request to a generating endpoint.

    Attributes:
        id: id of the answer: the type of its object, and the request's own id.
        created: seconds since 1970.
        model: the model name in the answer.
        marks: priority, cache salt and owner, as arguments of ``AsyncLLM.submit_all``.
        load_format: the form of the load report in the answer's headers; empty: none.
    """

    context: ServerContext
    body: _Body
    id: str
    created: int
    model: str
    marks: Mapping[str, Any]
    load_format: str = ""

    async def submit(
        self,
        items: Sequence[tuple[Any, SamplingParams]],
        field: str = "prompt",
        *,
        is_scored: bool = False,
    ) -> list[Generation]:
        """Submit prompts to the engine; errors use the field names that the client sent.

        Args:
            field: the name of the prompts in the request.
            is_scored: only the prompts' log-probabilities are computed.
        """
        for _, params in items:
            if self.body.stream and params.num_generated != params.n:
                limit = "must equal n for stream = true: the best answers are known only at the end"
                raise InvalidInputError("best_of", params.best_of, limit)
        num_output = max((params.max_tokens or 1 for _, params in items), default=1)
        num_output = 0 if is_scored else num_output
        with context_errors(num_output), client_names(self.body):
            try:
                return await self.context.engine.submit_all(
                    items, is_scored=is_scored, **self.marks
                )
            except InvalidInputError as error:
                name = error.field.removeprefix("prompt.") if error.field in _MARKS else error.field
                raise error.renamed(field if name == "prompt" else name) from None


def read_call(
    body: _Body, request: Request, context: ServerContext, prefix: str = ""
) -> Call[_Body]:
    """
    Args:
        prefix: prefix of the answer's id.

    Raises:
        ApiError: there is no such model.
        InvalidInputError: a field is not supported, or does not fit this request.
    """
    model = check_model(context, body.model)
    options = body.stream_options
    if options is not None and not body.stream and not options.is_empty:
        limit = "requires stream = true"
        raise InvalidInputError("stream_options", options.model_dump(exclude_unset=True), limit)
    if body.priority and context.engine.llm.config.policy != "priority":
        limit = "must be 0: the server runs without the policy 'priority'"
        raise InvalidInputError("priority", body.priority, limit)
    marks = {
        "priority": body.priority or None,
        "cache_salt": salt_of(request, body.cache_salt),
        "owner": owner_of(request, getattr(body, "user", None), context),
    }
    answer_id = prefix + (body.request_id or request_id_of(request))
    load_format = request.headers.get("endpoint-load-metrics-format", "")
    return Call(context, body, answer_id, int(time.time()), model, marks, load_format)
