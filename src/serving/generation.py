"""A submitted prompt: its answers as deltas, or complete."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Any

from ..engine.growing_answer import GrowingAnswer
from ..engine.inputs import PromptInput
from ..engine.logprob_lists import PromptLogprobs, SampleLogprobs
from ..engine.logprob_output import prompt_entries
from ..engine.outputs import CompletionOutput, RequestOutput
from ..engine.request_factory import RequestFactory
from ..engine.sampling_params import RequestOutputKind
from ..errors import InvalidInputError
from .served import Served


@dataclass(frozen=True, slots=True)
class AnswerDelta:
    """The new part of an answer.

    Attributes:
        index: index of the answer, from 0.
        text: may be empty while characters or stop strings are incomplete, and "" with
            ``detokenize=False``. The pieces, joined, are the answer's text.
        token_ids: new token ids.
        logprobs: entries for ``token_ids``, see :class:`CompletionOutput`; None without
            ``logprobs``.
        finish_reason: None except in the last delta of an answer.
        stop_reason: see :class:`CompletionOutput`.
    """

    index: int
    text: str
    token_ids: list[int]
    logprobs: SampleLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None

    @classmethod
    def of(cls, part: CompletionOutput) -> AnswerDelta:
        """A part of an answer that has this index, text and tokens."""
        return cls(
            part.index,
            part.text,
            part.token_ids,
            part.logprobs,
            part.finish_reason,
            part.stop_reason,
        )


class Generation:
    """A submitted prompt; returned by :meth:`AsyncLLM.submit`.

    Use it with ``async with``, or call :meth:`abort` at the end, so that unread answers are not
    computed. Garbage collection also aborts it.

    Attributes:
        request_id: the caller's id, or a number.
        prompt: the checked prompt, with its token ids.
    """

    def __init__(
        self,
        served: Served,
        factory: RequestFactory,
        tokenizer: Any,
        abort: Callable[[Served], None],
    ) -> None:
        self._served, self._factory, self._tokenizer = served, factory, tokenizer
        self._abort = abort

    @property
    def request_id(self) -> str:
        return self._served.request_id

    @property
    def prompt(self) -> PromptInput:
        return self._served.prompt

    @property
    def num_prompt_tokens(self) -> int:
        return len(self._served.prompt.token_ids)

    @property
    def num_output_tokens(self) -> int:
        """Settled output tokens so far, of all answers."""
        return self._served.num_output_tokens

    @property
    def output_kind(self) -> RequestOutputKind:
        return self._served.params.output_kind

    @property
    def num_answers(self) -> int:
        """Number of continuations, with ``best_of`` also those that are not returned."""
        return len(self._served.requests)

    @property
    def has_parts(self) -> bool:
        """Whether :meth:`deltas` can be used: not with ``best_of`` above ``n``."""
        params = self._served.params
        return params.num_generated == params.n

    @property
    def has_ended(self) -> bool:
        """Whether all answers have ended, so that :meth:`result` returns at once."""
        return self._served.has_ended

    @property
    def num_cached_tokens(self) -> int:
        """Prompt tokens found in the prefix cache; known once an output token is settled."""
        return self._served.requests[0].num_cached_tokens

    @property
    def prediction_counts(self) -> tuple[int, int]:
        """Draft tokens from the prediction so far, of all answers: accepted and rejected."""
        requests = self._served.requests
        num_accepted = sum(request.num_accepted_predicted for request in requests)
        return num_accepted, sum(request.num_predicted for request in requests) - num_accepted

    @property
    def prompt_logprobs(self) -> PromptLogprobs | None:
        """See :class:`RequestOutput`; complete once an output token is settled."""
        params = self._served.params
        decode = self._factory.decode_one if params.detokenize else None
        return prompt_entries(self._served.requests[0], decode)

    async def result(self) -> RequestOutput:
        """The complete answers, as from ``LLM.generate``.

        Raises:
            RequestError, EngineError: the request failed.
        """
        while not self._served.has_ended:
            await self._news()
        error = self._served.error()
        if error is not None:
            raise error
        served = self._served
        metrics = [served.ends[request].metrics for request in served.requests]
        output = self._factory.output(served.requests, served.prompt, metrics)
        output.request_id = served.request_id
        return output

    async def deltas(self) -> AsyncIterator[list[AnswerDelta]]:
        """New deltas, at most one per answer. A slow reader gets fewer, longer deltas. Can be
        iterated once.

        Raises:
            InvalidInputError: ``best_of`` exceeds ``n``: the best answers are known only at the
                end.
            RequestError, EngineError: the request failed before its end.
        """
        params = self._served.params
        if not self.has_parts:
            limit = "must be None or n: the best answers are known only at the end"
            raise InvalidInputError("best_of", params.best_of, limit)
        decode = self._factory.decode_one if params.detokenize else None
        answers = [
            GrowingAnswer(index, request, self._served.prompt, self._tokenizer, decode)
            for index, request in enumerate(self._served.requests)
        ]
        while answers:
            # Read the ends before the tokens, so that an ended answer is read completely.
            ended = set(self._served.ends)
            error = self._served.error()
            if error is not None:
                raise error
            parts = [self._ended(a) if a.request in ended else a.read() for a in answers]
            deltas = [AnswerDelta.of(part) for part in parts if part is not None]
            answers = [answer for answer in answers if answer.request not in ended]
            if deltas:
                yield deltas
            if answers:
                # News that arrived since the read has set the event, so none is missed.
                await self._news()

    def _ended(self, answer: GrowingAnswer) -> CompletionOutput:
        """The last part of an answer."""
        served = self._served
        return answer.cut(self._factory.completion(answer.index, answer.request, served.prompt))

    def abort(self) -> None:
        """End it now, with reason "abort", from any thread; a no-op after its end."""
        if not self._served.has_ended:
            self._abort(self._served)

    async def _news(self) -> None:
        await self._served.news.wait()
        self._served.news.clear()

    async def __aenter__(self) -> Generation:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.abort()


async def outputs_of(generation: Generation) -> AsyncIterator[RequestOutput]:
    """The outputs that ``output_kind`` selects.

    CUMULATIVE: the whole answers so far; the last output is that of :meth:`Generation.result`.
    DELTA: the answers with something new, and only what is new; the first output also has
    ``prompt_logprobs``, the last the metrics. FINAL_ONLY, and with ``best_of``: the result.
    """
    kind = generation.output_kind
    if kind is RequestOutputKind.FINAL_ONLY or not generation.has_parts:
        yield await generation.result()
        return
    is_delta = kind is RequestOutputKind.DELTA
    so_far: dict[int, CompletionOutput] = {}
    totals: dict[int, float | None] = {}
    num_unfinished, is_first = generation.num_answers, True
    async for deltas in generation.deltas():
        new = [_answer(delta, totals.get(delta.index)) for delta in deltas]
        totals |= {answer.index: answer.cumulative_logprob for answer in new}
        num_unfinished -= sum(answer.finished() for answer in new)
        if not is_delta:
            for answer in new:
                whole = so_far.setdefault(answer.index, CompletionOutput(answer.index, "", []))
                whole.extend(answer)
        if num_unfinished == 0 or (not is_delta and generation.has_ended):
            break
        yield RequestOutput(
            request_id=generation.request_id,
            prompt=generation.prompt.text,
            prompt_token_ids=generation.prompt.token_ids,
            prompt_logprobs=generation.prompt_logprobs if is_first or not is_delta else None,
            outputs=new if is_delta else [replace(so_far[index]) for index in sorted(so_far)],
            finished=False,
            num_cached_tokens=generation.num_cached_tokens,
        )
        is_first = False
    result = await generation.result()
    if is_delta:
        result.outputs = new
        result.prompt_logprobs = result.prompt_logprobs if is_first else None
    yield result


def _answer(delta: AnswerDelta, total: float | None) -> CompletionOutput:
    """The new part of an answer.

    Args:
        total: the sum of log-probabilities before it.
    """
    answer = CompletionOutput(
        delta.index,
        delta.text,
        delta.token_ids,
        logprobs=delta.logprobs,
        finish_reason=delta.finish_reason,
        stop_reason=delta.stop_reason,
    )
    if delta.logprobs is not None:
        total = total or 0.0
        for token, entries in zip(delta.token_ids, delta.logprobs, strict=True):
            total += entries[token].logprob  # in the engine's order of addition
        answer.cumulative_logprob = total
    return answer
