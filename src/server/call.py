"""What every generating endpoint does with a request before and after its own part."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from fastapi import Request

from ..aio.generation import AnswerDelta, Generation
from ..engine.outputs import CompletionOutput
from ..engine.sampling_params import SamplingParams
from ..errors import InvalidInputError
from .basic import check_model
from .context import ServerContext, owner_of, request_id_of, salt_of
from .errors import context_errors
from .protocol.fields import EngineFields
from .protocol.names import client_names

# As the engine calls them, of one prompt.
_MARKS = ("prompt.priority", "prompt.cache_salt")


@dataclass(frozen=True, slots=True)
class Call:
    """One request to generate.

    Attributes:
        id: of the answer: the kind of its object, and the request's own id.
        created: seconds since 1970.
        model: the name to answer with.
        with_usage: whether a stream ends with the usage.
        with_usages: whether each of its chunks has it.
    """

    context: ServerContext
    body: EngineFields
    id: str
    created: int
    model: str
    priority: int | None
    cache_salt: str | None
    owner: str
    with_usage: bool
    with_usages: bool

    async def submit(
        self,
        items: Sequence[tuple[Any, SamplingParams]],
        field: str = "prompt",
        *,
        is_scored: bool = False,
    ) -> list[Generation]:
        """Have prompts answered; errors name the fields that the client sent.

        Args:
            field: what the request calls its prompts.
            is_scored: only the prompts are wanted.
        """
        num_output = max((params.max_tokens or 1 for _, params in items), default=1)
        num_output = 0 if is_scored else num_output
        with context_errors(num_output), client_names(self.body):
            try:
                return await self.context.engine.submit_all(
                    items,
                    priority=self.priority,
                    cache_salt=self.cache_salt,
                    owner=self.owner,
                    is_scored=is_scored,
                )
            except InvalidInputError as error:
                name = error.field.removeprefix("prompt.") if error.field in _MARKS else error.field
                raise error.renamed(field if name == "prompt" else name) from None


def read_call(
    body: EngineFields, request: Request, context: ServerContext, prefix: str = ""
) -> Call:
    """
    Args:
        prefix: of the answer's id.

    Raises:
        ApiError: there is no such model.
        InvalidInputError: a field is not for this engine, or not for this request.
    """
    model = check_model(context, body.model)
    options = body.stream_options
    if options is not None and not body.stream and options.asks_for_anything:
        limit = "is for stream = true"
        raise InvalidInputError("stream_options", options.model_dump(exclude_none=True), limit)
    if body.priority and context.engine.llm.config.policy != "priority":
        limit = "is not supported: the server was not started with the policy 'priority'"
        raise InvalidInputError("priority", body.priority, limit)
    request_id = body.request_id or request_id_of(request)
    return Call(
        context,
        body,
        f"{prefix}{request_id}",
        int(time.time()),
        model,
        body.priority or None,
        salt_of(request, body.cache_salt),
        owner_of(request, getattr(body, "user", None), context),
        options is not None and bool(options.include_usage),
        options is not None and bool(options.continuous_usage_stats),
    )


def require_parts(params: SamplingParams) -> None:
    """Refuse what cannot be streamed."""
    if params.num_generated != params.n:
        limit = "must be n for stream = true: which are the best is known at the end"
        raise InvalidInputError("best_of", params.best_of, limit)


def whole(answer: CompletionOutput) -> AnswerDelta:
    """An answer, as if it had come in one piece."""
    return AnswerDelta(
        answer.index,
        answer.text,
        answer.token_ids,
        answer.logprobs,
        answer.finish_reason,
        answer.stop_reason,
    )
