"""``/inference/v1/generate``: token ids in, token ids out."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any, ClassVar

from fastapi import APIRouter, Request, Response

from ..engine.outputs import RequestOutput
from ..errors import InvalidInputError
from .bodies import BodyRoute, run_for_body
from .call import Answer, read_call
from .context import Context
from .logprob_fields import content_logprobs, id_entry, prompt_logprobs
from .protocol.absent import GENERATE, GENERATE_CHOICE
from .protocol.endpoints import GenerateRequest
from .sampling import generate_params
from .sse import Choices, Piece, respond

router = APIRouter(route_class=BodyRoute)


@router.post("/inference/v1/generate", response_model=None)
async def generate(body: GenerateRequest, request: Request, context: Context) -> Response:
    """Continue token ids."""
    call = read_call(body, request, context)
    with_text = body.output_mode == "text"
    num_bytes = len(await request.body())
    make = partial(generate_params, with_text=with_text)
    params = await run_for_body(num_bytes, make, body.sampling_params, context.defaults)
    item = {"prompt_token_ids": body.token_ids}, params
    if body.stream and params.prompt_logprobs is not None:
        name = "sampling_params.prompt_logprobs"
        raise InvalidInputError(name, params.prompt_logprobs, "is not supported with stream = true")
    generations = await call.submit([item], "token_ids")
    return await respond(_Choices(call, params, generations))


class _Choices(Choices[GenerateRequest]):
    head_names: ClassVar = {"request_id": ""}
    _is_begun = False

    def content(self, results: Sequence[RequestOutput]) -> dict[str, Any]:
        (result,) = results
        found: dict[str, Any] = {
            **self.head,
            **GENERATE,
            "choices": [{**self.choice(a), **GENERATE_CHOICE} for a in result.outputs],
            "prompt_logprobs": prompt_logprobs(result.prompt_logprobs),
            "usage": self.usage(),
        }
        if self._body.return_token_ids:
            found["prompt_token_ids"] = result.prompt_token_ids
        return found

    def pieces(self, _place: int, delta: Answer) -> Iterator[Piece]:
        """The first chunk contains the prompt if ``return_token_ids`` is set."""
        has_prompt = self._body.return_token_ids and not self._is_begun
        self._is_begun = True
        prompt = self.generations[0].prompt
        extra = {"prompt_token_ids": prompt.token_ids} if has_prompt else None
        yield Piece(self.choice(delta), extra)

    def choice(self, delta: Answer) -> dict[str, Any]:
        logprobs = None
        if delta.logprobs is not None:
            num_top = -1 if self._params.logprob_token_ids else self._params.logprobs or 0
            logprobs = content_logprobs(
                delta.token_ids, delta.logprobs, num_top, id_entry, own_at_least=True
            )
        choice: dict[str, Any] = {"index": delta.index, "token_ids": delta.token_ids}
        if self._body.output_mode == "text":
            choice["text"] = delta.text
        return {
            **choice,
            "logprobs": logprobs,
            "finish_reason": delta.finish_reason,
            "stop_reason": delta.stop_reason,
        }
