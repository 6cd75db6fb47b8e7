"""The generation loop of a call: drives the engine for a list of prompts, a stream, or one text."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from typing import Any

from tqdm import tqdm

from ..errors import (
    EngineBusyError,
    InvalidInputError,
    PagespecError,
    RequestError,
)
from ..startup import is_watched
from .core import Engine
from .inputs import PromptInput
from .logprob_output import SCORE_PARAMS, score_of
from .outputs import RequestOutput, ScoreOutput
from .request import Request
from .request_factory import RequestFactory
from .request_totals import RequestTotals
from .sampling_params import SamplingParams
from .text.detokenizer import GrowingText

UseTqdm = bool | Callable[..., Any]
"""Whether to show a progress bar, or a function that makes one from tqdm's arguments."""

_SHOW_EVERY_S = 0.25
_END = object()  # end of a stream; None could be an item, which is then refused


class _Caller:
    """Held by a call, or for one item of it, while it waits for requests. When it is freed,
    however the call ended, the engine aborts the requests and drops their records."""

    __slots__ = ("__weakref__",)


Started = tuple[list[Request], PromptInput, _Caller]
"""The requests of a prompt, the prompt, and the object that keeps them alive."""


class GenerationLoop:
    """Makes requests, adds them to the engine, and steps it until they have ended.

    A call that ends early, by an error or because its iterator was closed, aborts its requests.
    Calls of several threads are served together: each steps the engine, or waits while another
    thread steps it, until its own requests have ended. If a failed or interrupted step of another
    call ended its requests, a call raises EngineError.

    Args:
        totals: counts the requests whose results are made.
    """

    def __init__(
        self, engine: Engine, factory: RequestFactory, totals: RequestTotals | None = None
    ) -> None:
        self._engine = engine
        self._factory = factory
        self._totals = totals

    def run(
        self, inputs: Sequence[PromptInput], params: Sequence[SamplingParams], use_tqdm: UseTqdm
    ) -> list[RequestOutput]:
        """Serve all prompts; the results are in their order.

        Args:
            use_tqdm: see :func:`progress_bar`.

        Raises:
            InvalidInputError: a prompt is refused; none is served then.
            EngineError: a step failed.
        """
        groups = [self._factory.make(*pair) for pair in zip(inputs, params, strict=True)]
        caller: _Caller | None = _Caller()
        try:
            for leader, *siblings in groups:
                self._engine.add(leader, caller, siblings)
            with progress_bar(use_tqdm, len(groups)) as bar:
                shown = time.perf_counter()
                for requests in groups:
                    while not _have_finished(requests):
                        self._engine.step()
                        if not bar.disable and time.perf_counter() - shown > _SHOW_EVERY_S:
                            _show_progress(bar, groups)
                            shown = time.perf_counter()
                if not bar.disable:
                    _show_progress(bar, groups)
            return [self.output(*pair) for pair in zip(groups, inputs, strict=True)]
        finally:
            caller = None
            self._engine.sweep()

    def score(self, inputs: Sequence[PromptInput], use_tqdm: UseTqdm) -> list[ScoreOutput]:
        """The log-probabilities of the prompts' own tokens. Raises like :meth:`run`."""
        outputs = self.run(inputs, [SCORE_PARAMS] * len(inputs), use_tqdm)
        return [score_of(output, self._factory.decode_one) for output in outputs]

    def iterate(
        self,
        items: Iterable[tuple[Any, SamplingParams] | InvalidInputError],
        read: Callable[[Any, Any], PromptInput],
        window: int,
    ) -> Iterator[RequestOutput | PagespecError]:
        """Serve a stream of (prompt, parameters) in its order.

        Args:
            items: an item that is an InvalidInputError is yielded unchanged; an item that is not
                a pair yields a new InvalidInputError.
            read: checks a prompt, given its parameters. An error that it or the engine raises is
                yielded in place of the result, also if the engine is busy.
            window: maximum number of items that are read but not yet yielded.

        Raises:
            InvalidInputError: ``items`` is not iterable.
            EngineError: a step failed.
        """
        try:
            source = iter(items)
        except TypeError as error:
            raise InvalidInputError("items", items, "must be an iterable of pairs") from error
        return self._iterate(source, read, window)

    def _iterate(
        self,
        source: Iterator[Any],
        read: Callable[[Any, Any], PromptInput],
        window: int,
    ) -> Iterator[RequestOutput | PagespecError]:
        pending: deque[Started | PagespecError] = deque()
        head: Started | PagespecError | None
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
                    except (InvalidInputError, EngineBusyError) as error:
                        pending.append(error)
                if not pending:
                    return
                head = pending[0]
                if isinstance(head, PagespecError):
                    yield head
                else:
                    while not _have_finished(head[0]):
                        self._engine.step()
                    try:
                        output: RequestOutput | RequestError = self.output(*head[:2])
                    except RequestError as error:  # only this request failed
                        output = error
                    yield output
                head = None
                pending.popleft()
        finally:
            head = None
            pending.clear()
            self._engine.sweep()

    def _start(self, item: Any, read: Callable[[Any, Any], PromptInput]) -> Started:
        if isinstance(item, InvalidInputError):
            raise item
        if not isinstance(item, (tuple, list)) or len(item) != 2:
            raise InvalidInputError("items", item, "must be (prompt, parameters)")
        return self.start(read(*item), item[1])

    def start(self, prompt: PromptInput, params: SamplingParams) -> Started:
        """Make and add the requests of a prompt. They end when the caller object is freed.

        Raises:
            InvalidInputError: the prompt or a parameter is refused.
        """
        requests, caller = self._factory.make(prompt, params), _Caller()
        self._engine.add(requests[0], caller, requests[1:])
        return requests, prompt, caller

    def stream(
        self, prompt: PromptInput, params: SamplingParams, tokenizer: Any
    ) -> Generator[tuple[int, str]]:
        """The texts of the answers as they grow, as (answer index, piece). Refusals are raised
        here, not by the iterator."""
        requests = self._factory.make(prompt, params)
        if not params.detokenize:
            raise InvalidInputError("detokenize", False, "must be True: a stream is text")
        for name in ("logprobs", "prompt_logprobs"):
            value = getattr(params, name)
            if value is not None:
                raise InvalidInputError(name, value, "must be None: a stream is text")
        if params.num_generated > params.n:
            limit = "must be None or n: the best answers are known only at the end"
            raise InvalidInputError("best_of", params.best_of, limit)
        return self._stream(requests, prompt, tokenizer)

    def _stream(
        self, requests: list[Request], prompt: PromptInput, tokenizer: Any
    ) -> Generator[tuple[int, str]]:
        texts = [GrowingText(request, prompt, tokenizer) for request in requests]
        caller: _Caller | None = _Caller()
        try:
            # Added on the iterator's first step: an iterator that is never read is not served.
            self._engine.add(requests[0], caller, requests[1:])
            while not _have_finished(requests):
                self._engine.step()
                for index, text in enumerate(texts):
                    piece = text.read()
                    if piece:
                        yield index, piece
            for answer, text in zip(self.output(requests, prompt).outputs, texts, strict=True):
                tail = answer.text[text.num_read :]
                if tail:
                    yield answer.index, tail
        finally:
            caller = None
            self._engine.sweep()

    def stream_tokens(self, prompt: PromptInput, params: SamplingParams) -> Generator[list[int]]:
        """The token ids of one answer as they grow. Refusals are raised here, not by the iterator.

        Raises:
            InvalidInputError: a parameter is refused; ``n`` must be 1.
        """
        if params.num_generated > 1:
            raise InvalidInputError("n", params.num_generated, "must be 1 here")
        (request,) = self._factory.make(prompt, params)
        return self._stream_tokens(request, prompt)

    def _stream_tokens(self, request: Request, prompt: PromptInput) -> Generator[list[int]]:
        caller: _Caller | None = _Caller()
        place = request.num_prompt_tokens
        try:
            self._engine.add(request, caller, [])
            has_finished = False
            while not has_finished:
                self._engine.step()
                has_finished = request.finish_reason is not None  # before reading its last tokens
                token_ids = request.token_ids[place:]
                place += len(token_ids)
                if token_ids:
                    yield token_ids
            self.output([request], prompt)  # raises if the request has failed
        finally:
            caller = None
            self._engine.sweep()

    def output(self, requests: Sequence[Request], prompt: PromptInput) -> RequestOutput:
        """The result of the finished requests of a prompt.

        Raises:
            RequestError, EngineError: one of them has failed.
        """
        for request in requests:
            error = self._engine.error(request)
            if error is not None:
                raise error
        metrics = [self._engine.metrics(request) for request in requests]
        if self._totals is not None:
            self._totals.add_result(requests, metrics)
        return self._factory.output(requests, prompt, metrics)


def only_text(pieces: Generator[tuple[int, str]]) -> Iterator[str]:
    """The pieces of a stream with a single answer, without the index."""
    try:
        for _, piece in pieces:
            yield piece
    finally:
        pieces.close()


def progress_bar(use_tqdm: UseTqdm, num_prompts: int) -> Any:
    """A bar of tqdm.

    Args:
        use_tqdm: True: on stderr, if it is watched: in a log file, each refresh would be a line.
            False: no bar. A function, such as ``functools.partial(tqdm, leave=False)``, is called
            with the keyword arguments ``total`` and ``desc``.
    """
    if callable(use_tqdm):
        return use_tqdm(total=num_prompts, desc="generate")
    return tqdm(total=num_prompts, desc="generate", disable=not (use_tqdm and is_watched()))


def _have_finished(requests: Sequence[Request]) -> bool:
    return all(request.finish_reason is not None for request in requests)


def _show_progress(bar: Any, groups: Sequence[Sequence[Request]]) -> None:
    """Show how many prompts are answered, and the rate of generated tokens since the start."""
    bar.n = sum(map(_have_finished, groups))
    num_tokens = sum(len(r.token_ids) - r.num_prompt_tokens for rs in groups for r in rs)
    elapsed = max(bar.format_dict["elapsed"], 1e-9)
    bar.set_postfix_str(f"{num_tokens / elapsed:.1f} tok/s")
