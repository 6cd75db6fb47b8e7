"""Requests that a caller adds under its own ids, and computes step by step."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

from ..errors import InvalidInputError
from .core import Engine
from .generation import GenerationLoop, Started, UseTqdm, progress_bar
from .growing_answer import GrowingAnswer
from .inputs import PromptInput
from .logprob_output import prompt_entries
from .outputs import RequestOutput
from .request_factory import RequestFactory
from .sampling_params import SamplingParams


class StepwiseRequests:
    """Adds requests by id; :meth:`step` computes one step and returns what is new.

    For one thread. The engine may serve other calls at the same time: each step computes the
    requests of all callers.
    """

    def __init__(
        self, engine: Engine, loop: GenerationLoop, factory: RequestFactory, tokenizer: Any
    ) -> None:
        self._engine, self._loop = engine, loop
        self._factory, self._tokenizer = factory, tokenizer
        self._open: dict[str, _OpenPrompt] = {}  # in the order of their arrival

    @property
    def num_unfinished(self) -> int:
        """Number of requests whose end :meth:`step` has not returned; each continuation counts."""
        return sum(len(prompt.requests) for prompt in self._open.values())

    def add(
        self, request_id: str, prompt: PromptInput, params: SamplingParams, kind: str | None = None
    ) -> None:
        """
        Args:
            kind: "CUMULATIVE", "DELTA" or "FINAL_ONLY", in place of the parameters'
                ``output_kind``.

        Raises:
            InvalidInputError: the id is in use, or the prompt or a parameter is refused.
        """
        if not isinstance(request_id, str):
            raise TypeError(f"request_id must be a string, got {type(request_id).__name__}")
        if request_id in self._open:
            raise InvalidInputError("request_id", request_id, "is in use")
        started = self._loop.start(prompt, params)
        self._open[request_id] = _OpenPrompt(
            request_id, started, self._factory, self._tokenizer, kind
        )

    def add_all(
        self,
        request_ids: Sequence[str],
        prompts: Sequence[PromptInput],
        params: Sequence[SamplingParams],
    ) -> None:
        """Add several prompts, each with an output at its end only: all of them or, if one is
        refused, none. Raises like :meth:`add`."""
        added = []
        try:
            for request_id, prompt, its_params in zip(request_ids, prompts, params, strict=True):
                self.add(request_id, prompt, its_params, "FINAL_ONLY")
                added.append(request_id)
        except BaseException:
            self.abort(added)
            raise

    def abort(self, request_ids: Iterable[str]) -> None:
        """End requests now, without an output. Ids that are not in use are skipped."""
        for request_id in request_ids:
            self._open.pop(request_id, None)
        self._engine.sweep()

    def step(self) -> list[RequestOutput]:
        """Compute one step. Returns an output per prompt with new tokens or an end.

        Raises:
            RequestError: one request failed; the others continue, and the next call returns their
                outputs.
            EngineError: the step failed, and all requests have ended.
        """
        if self._open:
            try:
                self._engine.step()
            except BaseException:
                self._open.clear()
                raise
        failed = next((name for name, one in self._open.items() if one.has_failed), None)
        if failed is not None:
            one = self._open.pop(failed)
            self._loop.output(one.requests, one.prompt)  # raises its error
        outputs = []
        for name, one in list(self._open.items()):
            if one.has_finished:
                outputs.append(one.last(self._loop.output(one.requests, one.prompt)))
                del self._open[name]
            else:
                output = one.read()
                if output is not None:
                    outputs.append(output)
        return outputs

    def complete(self, use_tqdm: UseTqdm) -> list[RequestOutput]:
        """Step until all requests have ended. Returns the last outputs in the order of arrival.
        Raises like :meth:`step`."""
        order = {name: place for place, name in enumerate(self._open)}
        ended = []
        with progress_bar(use_tqdm, len(order)) as bar:
            while self._open:
                ended += [output for output in self.step() if output.finished]
                bar.update(len(ended) - bar.n)
        return sorted(ended, key=lambda output: order[output.request_id])


class _OpenPrompt:
    """The requests of one prompt, and what was read of them."""

    def __init__(
        self,
        request_id: str,
        started: Started,
        factory: RequestFactory,
        tokenizer: Any,
        kind: str | None,
    ) -> None:
        self.requests, self.prompt, self._caller = started
        self._request_id = request_id
        params = self.requests[0].sampling_params
        self._kind = kind or params.output_kind.name
        self._decode = factory.decode_one if params.detokenize else None
        # With best_of above n, the answers are known only at the end.
        has_parts = self._kind != "FINAL_ONLY" and params.num_generated == params.n
        self._answers = [
            GrowingAnswer(index, request, self.prompt, tokenizer, self._decode)
            for index, request in enumerate(self.requests if has_parts else ())
        ]
        self._so_far = [answer.empty() for answer in self._answers]
        self._is_begun = False

    @property
    def has_finished(self) -> bool:
        return all(request.finish_reason is not None for request in self.requests)

    @property
    def has_failed(self) -> bool:
        return self.has_finished and any(r.finish_reason == "error" for r in self.requests)

    def read(self) -> RequestOutput | None:
        """An output without end; None if nothing is new."""
        is_delta = self._kind == "DELTA"
        new = [part for answer in self._answers if (part := answer.read()) is not None]
        if not new:
            return None
        for part in new:
            scores = self.requests[part.index].logprobs
            if part.logprobs is not None and scores is not None:
                part.cumulative_logprob = scores.cumulative
            if not is_delta:
                self._so_far[part.index].extend(part)
        output = RequestOutput(
            request_id=self._request_id,
            prompt=self.prompt.text,
            prompt_token_ids=self.prompt.token_ids,
            outputs=new if is_delta else [replace(answer) for answer in self._so_far],
            finished=False,
        )
        if not (is_delta and self._is_begun):
            output.prompt_logprobs = prompt_entries(self.requests[0], self._decode)
        self._is_begun = True
        return output

    def last(self, output: RequestOutput) -> RequestOutput:
        """The last output of the kind, from the whole result."""
        output.request_id = self._request_id
        if self._kind == "DELTA":
            for answer, read in zip(output.outputs, self._answers, strict=False):
                read.cut(answer)
            if self._is_begun:
                output.prompt_logprobs = None
        return output
