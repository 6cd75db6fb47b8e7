"""``/inference/v1/generate``: token ids in, token ids out."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

from fastapi import APIRouter, Request, Response

from ..aio.generation import AnswerDelta, Generation
from ..engine.outputs import RequestOutput
from ..engine.sampling_params import SamplingParams
from ..errors import InvalidInputError
from .bodies import BodyRoute, run_for_body
from .call import Call, read_call, require_parts, whole
from .context import Context
from .logprobs import generate_logprobs, prompt_logprobs
from .protocol.completions import GenerateRequest
from .sampling import generate_params
from .sse import Choices, Extra, respond

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
    if body.stream:
        require_parts(params)
        if params.prompt_logprobs is not None:
            limit = "is not for stream = true"
            raise InvalidInputError(
                "sampling_params.prompt_logprobs", params.prompt_logprobs, limit
            )
    choices = _Choices(call, body, params, await call.submit([item], "token_ids"))
    # Of a long prompt there are many numbers to write.
    is_long = params.prompt_logprobs is not None
    return await respond(choices, is_stream=bool(body.stream), is_long=is_long)


class _Choices(Choices):
    def __init__(
        self,
        call: Call,
        body: GenerateRequest,
        params: SamplingParams,
        generations: Sequence[Generation],
    ) -> None:
        super().__init__(call, params, generations, request_id=call.id)
        self._body = body
        self._owes_prompt = bool(body.return_token_ids)

    def content(self, results: Sequence[RequestOutput]) -> dict[str, Any]:
        (result,) = results
        found: dict[str, Any] = {
            **self.head,
            "choices": [self.choice(whole(answer)) for answer in result.outputs],
            "prompt_logprobs": prompt_logprobs(result.prompt_logprobs),
            "usage": self.usage(),
        }
        if self._body.return_token_ids:
            found["prompt_token_ids"] = result.prompt_token_ids
        return found

    def pieces(self, _place: int, delta: AnswerDelta) -> Iterator[tuple[dict[str, Any], Extra]]:
        """The first has the prompt, if it is asked for."""
        extra: Extra = None
        if self._owes_prompt:
            self._owes_prompt = False
            extra = {"prompt_token_ids": self.generations[0].prompt.token_ids}
        yield self.choice(delta), extra

    def choice(self, delta: AnswerDelta) -> dict[str, Any]:
        logprobs = None
        if delta.logprobs is not None:
            num_top = self._params.logprobs or 0
            logprobs = {"content": generate_logprobs(delta.token_ids, delta.logprobs, num_top)}
        choice: dict[str, Any] = {"index": delta.index, "token_ids": delta.token_ids}
        if self._body.output_mode == "text":
            choice["text"] = delta.text
        return {
            **choice,
            "logprobs": logprobs,
            "finish_reason": delta.finish_reason,
            "stop_reason": delta.stop_reason,
        }
