"""The generation loop of a call: drives the engine for a list of prompts, a stream, or one text."""

from __future__ import annotations

import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from tqdm import tqdm

from ..errors import EngineError, InvalidInputError, PagespecError, RequestError
from .core import Engine
from .detokenizer import Detokenizer, StopStringWatcher
from .inputs import PromptInput
from .logprob_output import SCORE_PARAMS, score_of
from .outputs import RequestOutput, ScoreOutput
from .request import Request
from .request_factory import RequestFactory
from .sampling_params import SamplingParams

_SHOW_EVERY_S = 0.1
_END = object()  # of a stream: None may be one of its items, which is then refused


class _Caller:
    """Held by a call, or for one item of it, as long as it waits for requests: when it is gone, in
    whatever way the call ended, the engine aborts and forgets them."""

    __slots__ = ("__weakref__",)


_Started = tuple[Request, PromptInput, _Caller]


class GenerationLoop:
    """Makes requests, adds them to the engine, and steps it until they are done.

    A call that ends early, by an error or because its iterator was closed, aborts what it added.
    Calls of several threads are served together: each steps the engine, or waits while another
    does, until its own requests are done. A call whose requests were ended by the failed or
    interrupted step of another raises EngineError.
    """

    def __init__(self, engine: Engine, factory: RequestFactory) -> None:
        self._engine = engine
        self._factory = factory

    def run(
        self, inputs: Sequence[PromptInput], params: Sequence[SamplingParams], use_tqdm: bool
    ) -> list[RequestOutput]:
        """Serve all of them; results in their order.

        Raises:
            InvalidInputError: one was refused; none is served.
            EngineError: a step failed.
        """
        requests = [self._factory.make(*pair) for pair in zip(inputs, params, strict=True)]
        caller: _Caller | None = _Caller()
        try:
            for request in requests:
                self._engine.add(request, caller)
            is_shown = use_tqdm and sys.stderr is not None  # there is none under pythonw
            with tqdm(total=len(requests), desc="generate", disable=not is_shown) as bar:
                shown = time.perf_counter()
                for request in requests:
                    while request.finish_reason is None:
                        self._engine.step()
                        if not bar.disable and time.perf_counter() - shown > _SHOW_EVERY_S:
                            _show_progress(bar, requests)
                            shown = time.perf_counter()
                if not bar.disable:
                    _show_progress(bar, requests)
            return [self._output(*pair) for pair in zip(requests, inputs, strict=True)]
        finally:
            caller = None
            self._engine.sweep()

    def score(self, inputs: Sequence[PromptInput], use_tqdm: bool) -> list[ScoreOutput]:
        """The log-probabilities of the prompts' own tokens. Raises as :meth:`run`."""
        outputs = self.run(inputs, [SCORE_PARAMS] * len(inputs), use_tqdm)
        return [score_of(output, self._factory.decode_one) for output in outputs]

    def iterate(
        self,
        items: Iterable[tuple[Any, SamplingParams]],
        read: Callable[[Any, Any], PromptInput],
        window: int,
    ) -> Iterator[RequestOutput | PagespecError]:
        """Serve a stream of (prompt, parameters) in its order.

        Args:
            items: one that is no such pair yields an InvalidInputError in its place.
            read: checks a prompt, given its parameters. What it or the engine refuses yields its
                error in its place.
            window: how many items are read and not yet yielded at most.

        Raises:
            EngineError: a step failed.
        """
        source = iter(items)
        pending: deque[_Started | InvalidInputError] = deque()
        head: _Started | InvalidInputError | None
        is_exhausted = False
        try:
            while True:
                while not is_exhausted and len(pending) < window:
                    item: Any = next(source, _END)
                    if item is _END:
                        is_exhausted = True
                        break
                    try:
                        pending.append(self._start(item, read))
                    except InvalidInputError as error:
                        pending.append(error)
                if not pending:
                    return
                head = pending[0]
                if isinstance(head, InvalidInputError):
                    yield head
                else:
                    while head[0].finish_reason is None:
                        self._engine.step()
                    yield self._output_or_error(*head[:2])
                head = None
                pending.popleft()
        finally:
            head = None
            pending.clear()
            self._engine.sweep()

    def _start(self, item: Any, read: Callable[[Any, Any], PromptInput]) -> _Started:
        if not isinstance(item, (tuple, list)) or len(item) != 2:
            raise InvalidInputError("items", item, "must be (prompt, parameters)")
        prompt, caller = read(*item), _Caller()
        request = self._factory.make(prompt, item[1])
        self._engine.add(request, caller)
        return request, prompt, caller

    def stream(self, prompt: PromptInput, params: SamplingParams, tokenizer: Any) -> Iterator[str]:
        """The text of one answer as it grows. A refusal is raised here, not by the iterator."""
        request = self._factory.make(prompt, params)
        if not params.detokenize:
            raise InvalidInputError("detokenize", False, "must be True: a stream is text")
        return self._stream(request, prompt, tokenizer)

    def _stream(self, request: Request, prompt: PromptInput, tokenizer: Any) -> Iterator[str]:
        watcher = request.on_token
        params = request.sampling_params
        detokenizer = Detokenizer(
            tokenizer, prompt.token_ids, skip_special_tokens=params.skip_special_tokens
        )
        num_read = 0 if isinstance(watcher, StopStringWatcher) else request.num_prompt_tokens
        num_yielded = 0
        caller: _Caller | None = _Caller()
        try:
            # Added on the first step of the iterator: one that is never read must not be served.
            self._engine.add(request, caller)
            while request.finish_reason is None:
                self._engine.step()
                if isinstance(watcher, StopStringWatcher):
                    # Read once: another thread may append meanwhile.
                    pieces = watcher.settled_pieces[num_read:]
                    num_read += len(pieces)
                    piece = "".join(pieces)
                else:
                    new = request.token_ids[num_read:]
                    num_read += len(new)
                    # The text of a stop token comes at the end, if at all.
                    stops = request.stop_token_ids
                    piece = "".join(detokenizer.push(i) for i in new if i not in stops)
                if piece:
                    yield piece
                    num_yielded += len(piece)
            tail = self._output(request, prompt).outputs[0].text[num_yielded:]
            if tail:
                yield tail
        finally:
            caller = None
            self._engine.sweep()

    def _output_or_error(
        self, request: Request, prompt: PromptInput
    ) -> RequestOutput | RequestError:
        """An item of a stream: one that failed alone has its error in its place."""
        try:
            return self._output(request, prompt)
        except RequestError as error:
            return error

    def _output(self, request: Request, prompt: PromptInput) -> RequestOutput:
        if request.finish_reason == "error":
            failure = self._engine.failure(request)
            kind = RequestError if self._engine.failed_alone(request) else EngineError
            raise kind(f"request {request.request_id} was ended: {failure}")
        return self._factory.output(request, prompt, self._engine.metrics(request))


def _show_progress(bar: Any, requests: Sequence[Request]) -> None:
    done = [request for request in requests if request.finish_reason is not None]
    bar.update(len(done) - bar.n)
    if bar.format_dict["elapsed"] > 0:
        num_tokens = sum(len(r.token_ids) - r.num_prompt_tokens for r in done)
        rate = num_tokens / bar.format_dict["elapsed"]
        bar.set_postfix_str(f"{rate:.1f} tok/s", refresh=False)
