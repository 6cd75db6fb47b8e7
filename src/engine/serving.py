"""Drives the engine for a caller: a list of prompts to its end, a stream of them, one as text."""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from tqdm import tqdm

from pagespec.engine.core import Engine
from pagespec.engine.detokenizer import Detokenizer, StopStringWatcher
from pagespec.engine.inputs import PromptInput
from pagespec.engine.outputs import RequestOutput
from pagespec.engine.request import Request
from pagespec.engine.request_factory import RequestFactory
from pagespec.engine.sampling_params import SamplingParams
from pagespec.errors import InvalidInputError, PagespecError

_END = object()  # of a stream: None may be one of its items, which is then refused


class Serving:
    """Makes requests, adds them to the engine, and steps it until they are done.

    A call that ends early, by an error or because its iterator was closed, aborts what it added.
    """

    def __init__(self, engine: Engine, factory: RequestFactory) -> None:
        self._engine = engine
        self._factory = factory

    def run(
        self, inputs: Sequence[PromptInput], params: Sequence[SamplingParams], use_tqdm: bool
    ) -> list[RequestOutput]:
        """Serve all of them; results in their order.

        Raises:
            InvalidInputError: one was refused; none was started.
        """
        requests = [self._factory.make(*pair) for pair in zip(inputs, params, strict=True)]
        try:
            for request in requests:
                self._engine.add(request)
            num_output_tokens = 0
            is_shown = use_tqdm and sys.stderr is not None  # there is none under pythonw
            with tqdm(total=len(requests), desc="generate", disable=not is_shown) as bar:
                remaining = set(requests)
                while remaining:
                    for request in self._engine.step():
                        if request in remaining:
                            remaining.discard(request)
                            num_output_tokens += len(request.token_ids) - request.num_prompt_tokens
                            bar.update()
                    if not bar.disable and bar.format_dict["elapsed"] > 0:
                        rate = num_output_tokens / bar.format_dict["elapsed"]
                        bar.set_postfix_str(f"{rate:.1f} tok/s", refresh=False)
            return [self._output(*pair) for pair in zip(requests, inputs, strict=True)]
        finally:
            self._forget(requests)

    def iterate(
        self,
        items: Iterable[tuple[Any, SamplingParams]],
        read: Callable[[Any], PromptInput],
        window: int,
    ) -> Iterator[RequestOutput | PagespecError]:
        """Serve a stream of (prompt, parameters) in its order.

        Args:
            items: one that is no such pair yields an InvalidInputError in its place.
            read: checks a prompt. What it or the engine refuses yields its error in its place.
            window: how many items are read and not yet yielded at most.
        """
        source = iter(items)
        pending: deque[tuple[Request, PromptInput] | PagespecError] = deque()
        is_exhausted = False
        try:
            while True:
                while not is_exhausted and len(pending) < window:
                    item: Any = next(source, _END)
                    if item is _END:
                        is_exhausted = True
                        break
                    try:
                        if not isinstance(item, (tuple, list)) or len(item) != 2:
                            raise InvalidInputError("items", item, "must be (prompt, parameters)")
                        prompt = read(item[0])
                        request = self._factory.make(prompt, item[1])
                        self._engine.add(request)
                        pending.append((request, prompt))
                    except PagespecError as error:
                        pending.append(error)
                if not pending:
                    return
                head = pending[0]
                if isinstance(head, PagespecError):
                    yield head
                elif head[0].finish_reason is not None:
                    output = self._output(*head)
                    self._engine.forget(head[0])
                    yield output
                else:
                    self._engine.step()
                    continue
                pending.popleft()
        finally:
            self._forget([entry[0] for entry in pending if not isinstance(entry, PagespecError)])

    def stream(self, prompt: PromptInput, params: SamplingParams, tokenizer: Any) -> Iterator[str]:
        """The text of one answer as it grows. A refusal is raised here, not by the iterator."""
        return self._stream(self._factory.make(prompt, params), prompt, tokenizer)

    def _stream(self, request: Request, prompt: PromptInput, tokenizer: Any) -> Iterator[str]:
        watcher = request.on_token
        detokenizer = Detokenizer(tokenizer, prompt.token_ids)
        num_read = 0 if isinstance(watcher, StopStringWatcher) else request.num_prompt_tokens
        num_yielded = 0
        # Added on the first step of the iterator: one that is never read must not be served.
        self._engine.add(request)
        try:
            while request.finish_reason is None:
                self._engine.step()
                if isinstance(watcher, StopStringWatcher):
                    piece = "".join(watcher.settled_pieces[num_read:])
                    num_read = len(watcher.settled_pieces)
                else:
                    new = request.token_ids[num_read:]
                    num_read += len(new)
                    stops = request.stop_token_ids
                    piece = "".join(detokenizer.push(i) for i in new if i not in stops)
                if piece:
                    yield piece
                    num_yielded += len(piece)
            tail = self._output(request, prompt).outputs[0].text[num_yielded:]
            if tail:
                yield tail
        finally:
            self._forget([request])

    def _output(self, request: Request, prompt: PromptInput) -> RequestOutput:
        return self._factory.output(request, prompt, self._engine.metrics(request))

    def _forget(self, requests: Sequence[Request]) -> None:
        """End what an interrupted call left behind, so that the next one starts clean."""
        for request in requests:
            if request.request_id in self._engine.scheduler.requests:
                self._engine.abort(request.request_id)
            self._engine.forget(request)
        while self._engine.has_work and not self._engine.scheduler.requests:
            self._engine.step()
