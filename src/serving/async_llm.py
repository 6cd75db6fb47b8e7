"""``AsyncLLM``: an ``LLM`` for asyncio. Methods named as in vLLM behave the same."""

from __future__ import annotations

import asyncio
import itertools
import logging
import math
import os
import threading
import warnings
import weakref
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar, Unpack

from ..engine.call_arguments import adds_special_tokens, truncations
from ..engine.config import EngineConfig, check_model
from ..engine.inputs import Marks
from ..engine.outputs import RequestOutput
from ..engine.sampling_params import SamplingParams
from ..engine.snapshot import EngineSnapshot, block_map, take_snapshot
from ..engine.structured_outputs import StructuredOutputs
from ..errors import (
    EngineBusyError,
    EngineError,
    EngineStoppedError,
    InvalidInputError,
    UnknownArgumentError,
)
from ..llm import LLM
from ..llm_engine import ASYNC_INSTEAD, refuse_attribute
from ..params.checks import integer
from ..params.declare import Param, defaults, param, takes
from ..params.foreign import ASYNC, CALL, refuse
from .engine_thread import EngineThread
from .generation import Generation, outputs_of
from .host import RequestHost
from .lanes import SHORT, is_quick, lane_of, num_chars_to_read
from .served import Loops, Observers, Served
from .started import Started

if TYPE_CHECKING:
    from transformers import PreTrainedModel

logger = logging.getLogger("pagespec")

_T = TypeVar("_T")
PAUSE_MODES = ("keep", "abort", "wait")
_POLL_S = 0.01
_MAX_CONSTRAINT_WAIT_S = 10.0


def _check_model(name: str, model: Any) -> Any:
    return model if isinstance(model, LLM) else check_model(name, model)


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class AsyncArgs(EngineConfig):
    """The arguments of ``AsyncLLM``."""

    model: LLM | str | os.PathLike[str] | PreTrainedModel = field(
        metadata={"param": Param("As for LLM; or an LLM, then owned by this object.", _check_model)}
    )
    max_num_requests: int | None = param(
        None,
        "Maximum number of waiting and running requests; more raise EngineBusyError. Each of n "
        "continuations counts.",
        integer(1, math.inf, "of 1 or more, or None"),
        absent="no limit",
    )


class AsyncLLM:
    """An ``LLM`` for many callers on event loops; its own thread steps the engine.

    Requests of all callers are batched together, and the tokens of a request equal those of
    ``LLM.generate``. A failed step ends every live request with EngineError. Before the next
    request, the engine tests itself with a request of one token; :meth:`check_health` reports the
    result.

    Call :meth:`shutdown` at the end. If an instance is garbage collected before, it emits a
    ResourceWarning, ends its thread, and ends live requests with EngineError.

    The arguments are those of ``LLM`` and of :class:`AsyncArgs`.

    Raises:
        InvalidInputError, UnsupportedModelError: as for ``LLM``.

    Attributes:
        llm: its methods may also be called. They step the engine for all callers, even while
            generation is paused.
        observers: receive events of requests; must be added before the first request.
        is_stopping: whether :meth:`shutdown` was called.
    """

    @classmethod
    def from_engine_args(
        cls, engine_args: Any, start_engine_loop: bool = True, **others: Any
    ) -> AsyncLLM:
        """Make an engine from ``AsyncEngineArgs``, as vLLM does.

        Args:
            engine_args: any object whose attributes are arguments of this class.
            start_engine_loop: must be True: the engine always has its thread.
            others: vLLM's ``usage_context`` is ignored; ``stat_loggers`` must be None.

        Raises:
            InvalidInputError, UnsupportedModelError: as for the class.
        """
        for name, value in {"start_engine_loop": start_engine_loop, **others}.items():
            if name not in ASYNC:
                raise UnknownArgumentError(name, value, ASYNC)
            refuse(name, value, ASYNC)
        return cls(**vars(engine_args))

    @takes(AsyncArgs)
    def __init__(self, args: AsyncArgs) -> None:
        model, arguments = args.model, args.arguments()
        if isinstance(model, LLM):
            for name, value in arguments.items():
                if value != defaults(EngineConfig)[name]:
                    raise InvalidInputError(name, value, "must be an argument of that LLM")
        self.llm = model if isinstance(model, LLM) else LLM(model, **arguments)
        self.max_num_requests = max_num_requests = args.max_num_requests
        self.observers = Observers()
        self._reader, self._factory = self.llm.reader, self.llm.factory
        self._engine = self.llm.engine
        self._numbers = itertools.count()
        self.is_stopping = False
        self._ended: Future[None] | None = None  # set by shutdown
        self._resumed: Future[None] | None = None  # set while generation is paused
        # Nothing that the thread refers to may refer to this object, or it would never be freed.
        observers, wake = weakref.ref(self.observers), threading.Event()
        self._loops = Loops(observers)
        self._host = host = RequestHost(
            self._engine, self._factory, max_num_requests, observers, self._loops, wake
        )
        self._thread = EngineThread(
            self._engine, wake, host.after_step, host.on_failure, host.end_all
        )
        self._abort = partial(_abort, self._thread, host)
        self._finalizer = weakref.finalize(self, _end_dropped, self._thread)
        self._finalizer.atexit = False

    if not TYPE_CHECKING:  # type checkers would accept every name

        def __getattr__(self, name: str) -> Any:
            """Called for names that are not found, such as methods of vLLM's AsyncLLM."""
            refuse_attribute(self, name, ASYNC_INSTEAD)

    # Requests ---------------------------------------------------------------------------------

    async def generate(
        self,
        prompt: Any,
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        prompt_text: str | None = None,
        lora_request: Any = None,
        tokenization_kwargs: Mapping[str, Any] | None = None,
        trace_headers: Mapping[str, str] | None = None,
        data_parallel_rank: int | None = None,
        reasoning_ended: bool | None = None,
        reasoning_parser_kwargs: Mapping[str, Any] | None = None,
        **marks: Unpack[Marks],
    ) -> AsyncIterator[RequestOutput]:
        """Answer a prompt. Yields the whole answers so far, each time; the last one, with
        ``finished``, equals the result of ``LLM.generate``. Other kinds of outputs: see
        ``output_kind`` of :class:`SamplingParams`. Closing the iterator aborts the request.

        See :meth:`submit` for the arguments and errors. Arguments that :meth:`submit` lacks are
        vLLM's. They must be None, or say what is done anyway (docs/from_vllm.md).
        """
        for name, value in (
            ("prompt_text", prompt_text),
            ("lora_request", lora_request),
            ("trace_headers", trace_headers),
            ("data_parallel_rank", data_parallel_rank),
            ("reasoning_ended", reasoning_ended),
            ("reasoning_parser_kwargs", reasoning_parser_kwargs),
        ):
            if value is not None:
                refuse(name, value, CALL)
        async with await self.submit(
            prompt, sampling_params, request_id, tokenization_kwargs=tokenization_kwargs, **marks
        ) as generation:
            async for output in outputs_of(generation):
                yield output

    async def submit(
        self,
        prompt: Any,
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        tokenization_kwargs: Mapping[str, Any] | None = None,
        **marks: Unpack[Marks],
    ) -> Generation:
        """Submit a prompt.

        Args:
            prompt: as for ``LLM.generate`` (one item), or a ``PromptInput``.
            sampling_params: None: those of ``LLM.get_default_sampling_params``.
            request_id: an id for :meth:`abort`, unique among live requests. None: a number.
            tokenization_kwargs: as for ``LLM.generate``.
            marks: priority, cache_salt, owner, as in a prompt's dict; None: the prompt's own.

        Raises:
            InvalidInputError: the prompt or a parameter is refused, or it has more continuations
                than ``max_num_requests``.
            EngineBusyError: ``max_num_requests`` requests are live, or the owner has so many that
                the rest is reserved for other owners.
            EngineStoppedError: the engine is shutting down.
            EngineError: the engine has failed, and failed again when it tested itself.
        """
        ids = None if request_id is None else [request_id]
        params = sampling_params
        if params is None:
            params = self.llm.get_default_sampling_params()
        (generation,) = await self.submit_all(
            [(prompt, params)], ids, tokenization_kwargs=tokenization_kwargs, **marks
        )
        return generation

    async def submit_all(
        self,
        items: Sequence[tuple[Any, SamplingParams]],
        request_ids: Sequence[str] | None = None,
        *,
        is_scored: bool = False,
        tokenization_kwargs: Mapping[str, Any] | None = None,
        **marks: Unpack[Marks],
    ) -> list[Generation]:
        """Submit several prompts, each with its parameters: all of them or, if one is refused,
        none. Otherwise like :meth:`submit`.

        Args:
            is_scored: only the prompts' log-probabilities are computed; ``max_tokens`` must be 1. A
                prompt that is not a ``PromptInput`` may then have ``max_model_len`` tokens.
        """
        self._require_running()
        num_new = sum(getattr(params, "num_generated", 1) for _, params in items)
        self.check_num_requests(num_new)
        lock = self._reader.encoding_lock
        num_chars = sum(num_chars_to_read(prompt) for prompt, _ in items)
        # Non-blocking: the event loop must not wait for another thread's long text.
        if is_quick(items, num_new, num_chars) and lock.acquire(blocking=False):
            try:
                made = self._make(items, request_ids, marks, is_scored, tokenization_kwargs)
            finally:
                lock.release()
        else:
            made = await lane_of("text", num_chars).run(
                self._make, items, request_ids, marks, is_scored, tokenization_kwargs
            )
        await self._check_structures(made)
        while self._resumed is not None:
            await asyncio.shield(asyncio.wrap_future(self._resumed))
        self._require_running()
        here = self._loops.requests_of(asyncio.get_running_loop())
        generations = [Generation(s, self._factory, self.llm.tokenizer, self._abort) for s in made]
        handles = [self._host.handle(g, s) for g, s in zip(generations, made, strict=True)]
        for served in made:
            here.add(served)
        try:
            await self._call(lambda: self._host.admit(made, handles))
        except BaseException as error:
            for served in made:
                here.discard(served)
                # A cancelled task may keep this frame, and so the generations, by its exception.
                if not isinstance(error, Exception):
                    self._abort(served)
            raise
        return generations

    def check_num_requests(self, num_new: int) -> None:
        """Refuse a number of continuations that can never be live together.

        Raises:
            InvalidInputError: ``num_new`` exceeds ``max_num_requests``.
        """
        most = self.max_num_requests
        if most is not None and num_new > most:
            limit = f"must be at most max_num_requests = {most}, counted over all prompts"
            raise InvalidInputError("n", num_new, limit)

    def expect_several_owners(self) -> None:
        """Reserve places for owners with few requests from now on. Otherwise this starts when a
        second owner is seen. No effect except under the policy "fair"."""
        self._host.has_several_owners = True

    async def abort(self, request_id: str | Iterable[str], internal: bool = False) -> None:
        """End requests now, with reason "abort"; a no-op for those that are not live.

        Args:
            request_id: an id, or several.
            internal: must be False; vLLM has ids of its own besides the caller's.
        """
        refuse("internal", internal, ASYNC)
        ids = [request_id] if isinstance(request_id, str) else list(request_id)

        def abort() -> None:
            for one in ids:
                self._host.abort_id(one)

        await self._call(abort)

    # The engine -------------------------------------------------------------------------------

    async def pause_generation(
        self,
        mode: str = "keep",
        *,
        wait_for_inflight_requests: bool | None = None,
        clear_cache: bool = True,
    ) -> None:
        """Stop computing. New requests are accepted, and wait until the engine is resumed.

        Args:
            mode: "keep": live requests keep their blocks and continue later; "abort": they end
                with reason "abort"; "wait": they are completed first.
            wait_for_inflight_requests: vLLM's older argument; True is "wait".
            clear_cache: vLLM's; either value keeps the prefix cache, which changes no answer.

        Raises:
            EngineStoppedError: the engine was resumed or shut down while waiting.
        """
        refuse("clear_cache", clear_cache, ASYNC)
        if wait_for_inflight_requests:
            mode = "wait"
        if mode not in PAUSE_MODES:
            raise InvalidInputError("mode", mode, f"must be one of {', '.join(PAUSE_MODES)}")

        def pause() -> None:
            if mode == "abort":
                self._host.abort_all()
            self._host.settle(self._engine.settle)
            self._thread.is_paused = True

        if mode == "wait" and not self._thread.is_paused:
            held = self._resumed = self._resumed or Future()
            try:
                await self.wait_for_requests_to_drain()
            except BaseException:
                self._let_go()
                raise
            if held.done():
                raise EngineStoppedError("the pause was ended while it waited for requests")
        await self._call(pause)

    async def resume_generation(self) -> None:
        """Continue after :meth:`pause_generation`."""

        def resume() -> None:
            self._thread.is_paused = False

        await self._call(resume)
        self._let_go()

    def _let_go(self) -> None:
        """Submit the requests that waited for the end of a pause."""
        held, self._resumed = self._resumed, None
        if held is not None:
            held.set_result(None)

    async def is_paused(self) -> bool:
        return self._thread.is_paused

    async def reset_prefix_cache(
        self, reset_running_requests: bool = True, reset_connector: bool = False
    ) -> bool:
        """See ``LLMEngine.reset_prefix_cache``."""
        refuse("reset_connector", reset_connector, ASYNC)

        def reset() -> bool:
            if not reset_running_requests and self._engine.scheduler.requests:
                return False
            self._host.settle(self._engine.reset_prefix_cache)
            return True

        return await self._call(reset)

    async def wait_for_requests_to_drain(self, timeout_s: float | None = None) -> bool:
        """Wait until no request is live. Returns False if that took longer than ``timeout_s``."""
        try:
            async with asyncio.timeout(timeout_s):
                while self._host.num_live:
                    await asyncio.sleep(_POLL_S)
        except TimeoutError:
            return False
        return True

    def shutdown(
        self, drain_s: float = 0.0, *, timeout: float | None = None
    ) -> Coroutine[Any, Any, None]:
        """Refuse new requests, complete live ones within ``drain_s`` seconds, abort the rest, and
        end the engine's thread. The ``LLM`` remains usable.

        Await the result to wait for the end. A call whose result is dropped, as in vLLM, waits at
        once: it blocks until the current step ends, and drains nothing.

        Args:
            timeout: vLLM's name for ``drain_s``.
        """
        self.is_stopping = True
        self._let_go()
        drain_s = drain_s if timeout is None else timeout
        if self._thread.is_paused:
            drain_s = 0.0
        if not drain_s:
            self._end()
        return Started(self._shut_down(drain_s), self._end_and_join)

    async def _shut_down(self, drain_s: float) -> None:
        if drain_s:
            await self.wait_for_requests_to_drain(drain_s)
        with suppress(EngineError):  # the thread may have ended before
            await asyncio.wrap_future(self._end())
        await asyncio.to_thread(self._thread.close)

    def _end(self) -> Future[None]:
        """Abort all requests and let the engine's thread end, without waiting for it."""

        def end() -> None:
            self._host.abort_all()
            self._thread.close("the engine was shut down", waits=False)

        if self._ended is None:
            self._ended = self._thread.call(end)
            self._finalizer.detach()
        return self._ended

    def _end_and_join(self) -> None:
        """A process that exits while the thread computes may be aborted by torch."""
        ended = self._end()
        if not self._thread.is_current:
            with suppress(EngineError):
                ended.result()
            self._thread.close()

    async def check_health(self) -> None:
        """Raises:
        EngineError: the engine failed and has not recovered, or its thread has ended.
        """
        if self._host.needs_self_test and self._thread.is_alive:
            await self._call(lambda: None)  # runs after the engine's self-test
        if self.errored:
            raise self.dead_error

    @property
    def failure(self) -> str | None:
        """Why the engine cannot compute; None if it can."""
        return self._host.failure if self._thread.is_alive else "the engine's thread has ended"

    @property
    def is_running(self) -> bool:
        """Whether requests are accepted."""
        return not self.is_stopping and self._thread.is_alive

    @property
    def is_stopped(self) -> bool:
        return not self.is_running

    @property
    def errored(self) -> bool:
        """Whether the engine cannot compute; :attr:`failure` has the reason."""
        return self.failure is not None

    @property
    def dead_error(self) -> EngineError:
        """The error of a request that finds the engine failed."""
        return EngineError(self.failure or "the engine has not failed")

    @property
    def tokenizer(self) -> Any:
        return self.llm.tokenizer

    def get_tokenizer(self) -> Any:
        return self.llm.tokenizer

    async def is_tracing_enabled(self) -> bool:
        """Whether OpenTelemetry spans are sent: never."""
        return False

    async def do_log_stats(self) -> None:
        """Log the engine's counts, at level INFO."""
        logger.info("%s", self.snapshot())

    @property
    def num_live_requests(self) -> int:
        return self._host.num_live

    def snapshot(self) -> EngineSnapshot:
        """Counts of the engine's state, without waiting for it."""
        return take_snapshot(self._engine.scheduler)

    def block_map(self, every: int = 1) -> bytes:
        """One byte per KV block: 2: owned by a request, 1: in the prefix cache only, 0: free.
        ``every``: sample one block in this many."""
        return block_map(self._engine.scheduler, every)

    # On an event loop -------------------------------------------------------------------------

    def _require_running(self) -> None:
        if self.is_stopping:
            raise EngineStoppedError("the engine is shutting down")

    async def _call(self, operation: Callable[[], _T]) -> _T:
        return await asyncio.wrap_future(self._thread.call(operation))

    def _make(
        self,
        items: Sequence[tuple[Any, SamplingParams]],
        request_ids: Sequence[str] | None,
        marks: Marks,
        is_scored: bool,
        tokenization_kwargs: Mapping[str, Any] | None,
    ) -> list[Served]:
        """Make requests; may run on any thread."""
        made = []
        truncate = truncations(tokenization_kwargs, [params for _, params in items])
        adds = adds_special_tokens(tokenization_kwargs)
        for index, (prompt, params) in enumerate(items):
            field = "prompt" if len(items) == 1 else f"prompts[{index}]"
            read = self._reader.read_or_keep(
                prompt, field, truncate[index], is_scored=is_scored, add_special_tokens=adds
            )
            read = self._reader.marked(read, **marks)
            requests = self._factory.make(read, params, checks_structure=False)
            name = str(next(self._numbers)) if request_ids is None else request_ids[index]
            if not isinstance(name, str) or not name:
                raise InvalidInputError("request_id", name, "must be text, not empty")
            made.append(Served(name, read, requests[0].sampling_params, requests))
        return made

    async def _check_structures(self, made: Sequence[Served]) -> None:
        """Compile the constraints of these requests."""
        structures = self._factory.structures
        different: dict[Any, StructuredOutputs] = {}
        for served in made:
            outputs = served.params.structured_outputs
            if outputs is not None:
                different.setdefault((outputs.constraint, served.prompt.reasoning), outputs)
        for (constraint, reasoning), outputs in different.items():
            assert structures is not None  # otherwise the factory would have refused the request
            is_known = structures.is_known(outputs)
            lane = SHORT if is_known else lane_of("constraint", len(constraint.text))
            try:
                await lane.run(
                    structures.check, outputs, reasoning, max_wait_s=_MAX_CONSTRAINT_WAIT_S
                )
            except TimeoutError:
                raise EngineBusyError("constraints of other requests are being compiled") from None


def _abort(thread: EngineThread, host: RequestHost, served: Served) -> None:
    """Abort from any thread. The result is not awaited: the thread may have ended already."""
    thread.call(lambda: host.abort(served))


def _end_dropped(thread: EngineThread) -> None:
    thread.close("its AsyncLLM was dropped without shutdown()", waits=False)
    warnings.warn(
        "an AsyncLLM was dropped without shutdown(); its engine's thread is ended",
        ResourceWarning,
        stacklevel=2,
    )
