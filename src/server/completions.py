"""``/v1/completions``: continues texts or token ids."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any, ClassVar

from fastapi import APIRouter, Request, Response

from ..engine.inputs import PromptInput
from ..engine.outputs import RequestOutput
from ..engine.sampling_params import SamplingParams
from ..serving.lanes import lane_of
from .bodies import BodyRoute, require_bounded, run_for_body
from .call import Answer, read_call
from .context import Context, ServerContext
from .logprob_fields import CompletionLogprobs, Entries, joined_logprobs, prompt_logprobs
from .protocol.absent import COMPLETION, COMPLETION_CHOICE
from .protocol.endpoints import CompletionRequest, client_names
from .sampling import completion_params, is_echo_alone
from .sse import Choices, Piece, respond

router = APIRouter(route_class=BodyRoute)


@router.post("/v1/completions", response_model=None)
async def completions(body: CompletionRequest, request: Request, context: Context) -> Response:
    """Continue one prompt or several; choice ``i * n + j`` is answer j to prompt i."""
    call = read_call(body, request, context, "cmpl-")
    with client_names(body):
        num_bytes = len(await request.body())
        params = await run_for_body(num_bytes, completion_params, body, context.defaults)
    prompts = await _prompts_of(body, context, params)
    items = [(prompt, params) for prompt in prompts]
    generations = await call.submit(items, is_scored=is_echo_alone(body))
    return await respond(_Choices(call, params, generations))


async def _prompts_of(
    body: CompletionRequest, context: ServerContext, params: SamplingParams
) -> list[Any]:
    given, truncate = body.prompt, params.truncate_prompt_tokens
    is_one = isinstance(given, str) or not given or isinstance(given[0], int)
    # Before looking at the prompts, which may be millions.
    context.engine.check_num_requests(params.num_generated * (1 if is_one else len(given)))
    prompts: list[Any] = [given] if is_one else list(given)
    sizes = [len(prompt) for prompt in prompts if isinstance(prompt, str)]
    require_bounded("prompt", sum(sizes), truncate, context)
    if truncate is not None and body.truncation_side == "right":
        return await _beginnings(prompts, body, context, truncate)
    if body.add_special_tokens is not False or context.engine.llm.tokenizer is None:
        return prompts
    lane, reader = lane_of("text", sum(sizes)), context.engine.llm.reader
    encode = partial(reader.encode_prompt, field="prompt", truncate=truncate)
    return [await lane.run(encode, p) if isinstance(p, str) else p for p in prompts]


async def _beginnings(
    prompts: list[Any], body: CompletionRequest, context: ServerContext, most: int
) -> list[list[int]]:
    """The first ``most`` token ids of each prompt; -1: as many as leave space for one token."""
    llm = context.engine.llm
    end = llm.max_model_len - 1 if most == -1 else most
    add = body.add_special_tokens is not False
    encode = partial(llm.reader.encode, field="prompt", add_special_tokens=add)
    lane = lane_of("text", sum(len(prompt) for prompt in prompts if isinstance(prompt, str)))
    return [(await lane.run(encode, p) if isinstance(p, str) else p)[:end] for p in prompts]


class _Choices(Choices[CompletionRequest]):
    head_names: ClassVar = {"id": "", "object": "text_completion"}

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._is_prompt_alone = is_echo_alone(self._body)
        self._begun: dict[int, CompletionLogprobs | None] = {}

    def content(self, results: Sequence[RequestOutput]) -> dict[str, Any]:
        found = []
        for place, result in enumerate(results):
            for answer in result.outputs:
                choice = {**self.choice(place, answer), **COMPLETION_CHOICE}
                if self._body.prompt_logprobs is not None:
                    choice["prompt_logprobs"] = prompt_logprobs(result.prompt_logprobs)
                found.append(choice)
        return {**self.head, **COMPLETION, "choices": found, "usage": self.usage()}

    def index(self, place: int, delta: Answer) -> int:
        return place * self._params.n + delta.index

    def pieces(self, place: int, delta: Answer) -> Iterator[Piece]:
        # There may be tokens whose text is still incomplete.
        is_shown = delta.logprobs is not None or self._body.return_token_ids
        if is_shown or delta.text or delta.finish_reason is not None:
            yield Piece(self.choice(place, delta))

    def usage(self, num_output_tokens: int | None = None) -> dict[str, Any]:
        return super().usage(0 if self._is_prompt_alone else num_output_tokens)

    def choice(self, place: int, delta: Answer) -> dict[str, Any]:
        """A choice, or its new part.

        Args:
            place: index of the prompt.
        """
        body, index = self._body, self.index(place, delta)
        text, token_ids = delta.text, delta.token_ids
        entries: Sequence[Entries | None] | None = delta.logprobs
        if self._is_prompt_alone:
            text, token_ids, entries = "", [], None if entries is None else []
        is_first = index not in self._begun
        generation = self.generations[place]
        prompt = generation.prompt
        prompt_text = self._prompt_text(place, prompt) if is_first and body.echo else ""
        if is_first:
            self._begun[index] = (
                None
                if body.logprobs is None
                else CompletionLogprobs(
                    *(body.logprobs, self.texts, prompt.token_ids, len(prompt_text)),
                    shows_all=bool(body.logprob_token_ids),
                )
            )
        choice: dict[str, Any] = {"index": index, "text": prompt_text + text, "logprobs": None}
        logprobs = self._begun[index]
        if logprobs is not None and entries is not None:
            choice["logprobs"] = logprobs.read(token_ids, entries)
            if is_first and body.echo:
                known = generation.prompt_logprobs or []  # partial if the prompt was aborted
                before = logprobs.read_prompt(prompt.token_ids[: len(known)], known, prompt_text)
                choice["logprobs"] = joined_logprobs(before, choice["logprobs"])
        choice["finish_reason"], choice["stop_reason"] = delta.finish_reason, delta.stop_reason
        if self._is_prompt_alone and delta.finish_reason == "stop":
            choice["finish_reason"], choice["stop_reason"] = "length", None
        choice["token_ids"] = choice["prompt_token_ids"] = None
        if body.return_token_ids:
            choice["token_ids"] = token_ids
            if is_first:
                choice["prompt_token_ids"] = prompt.token_ids
        return choice

    def _prompt_text(self, place: int, prompt: PromptInput) -> str:
        """The prompt as given; for token ids or a truncated text, the decoded tokens, special ones
        included."""
        tokenizer = self._llm.tokenizer
        # A prompt encoded without special tokens is submitted without its text.
        prompts = self._body.prompt
        given = prompts if isinstance(prompts, str) else prompts[place]
        is_whole = self._params.truncate_prompt_tokens is None
        if isinstance(given, str) and is_whole:
            return given
        if tokenizer is None:
            return ""
        return str(tokenizer.decode(prompt.token_ids, skip_special_tokens=False))
