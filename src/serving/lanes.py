"""Thread pools for blocking work of event loops. Each *lane* is a pool, so long work never occupies
the threads of short work.

asyncio's executor has one queue for all work. A dozen grammars that take ten seconds each, or a
dozen texts of megabytes, would delay every chat.
"""

from __future__ import annotations

import asyncio
import math
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any, Literal, TypeVar

from ..engine.sampling_params import SamplingParams
from ..params.checks import is_list
from ..threads import start_native

_T = TypeVar("_T")
_IDLE_S = 30.0
# Longer prompts are tokenised on another thread, so that the event loop is not blocked.
_SHORT_TEXT = 2_000
_NUM_IDS_PER_CHAR = 8  # token ids that are checked in the time of tokenising one character
_MAX_QUICK = 8  # continuations
_HAS_AFFINITY = hasattr(os, "sched_getaffinity")
_NUM_CPUS = len(os.sched_getaffinity(0)) if _HAS_AFFINITY else os.cpu_count() or 1
# Threads with long work rest on machines where one thread is a large share of the CPUs.
_REST = 1.0 if _NUM_CPUS <= 4 else 0.0


class Lane:
    """At most ``num_threads`` threads with a FIFO queue.

    Threads start on demand and end when idle. At the exit of the process, queued work is dropped,
    and current work gets a few seconds to end. All threads have normal priority: a low-priority
    thread that is descheduled while it holds the GIL would stop all other threads.

    Args:
        rest_per_work: seconds of rest per second of CPU time. The rest bounds the share of the GIL
            that a queue of such work takes.
    """

    def __init__(self, name: str, num_threads: int, rest_per_work: float = 0.0) -> None:
        self._name, self._num_threads = name, num_threads
        self._rest_per_work = rest_per_work
        self._waiting: deque[tuple[Future[Any], Callable[[], Any]]] = deque()
        self._changed = threading.Condition()
        self._is_closing = threading.Event()
        self._num_live = self._num_idle = 0

    async def run(
        self, function: Callable[..., _T], *arguments: Any, max_wait_s: float | None = None
    ) -> _T:
        """Call ``function`` on a thread of this lane. If the caller is cancelled before a thread
        starts the call, the function is not called.

        Args:
            max_wait_s: maximum wait for a thread, in seconds.

        Raises:
            TimeoutError: no thread was free in time; the function is not called.
            RuntimeError: no thread can start.
        """
        future: Future[_T] = Future()
        self._add(future, lambda: function(*arguments))
        if max_wait_s is None:
            return await asyncio.wrap_future(future)
        is_late = False

        def give_up() -> None:
            nonlocal is_late
            is_late = future.cancel()

        timer = asyncio.get_running_loop().call_later(max_wait_s, give_up)
        try:
            return await asyncio.wrap_future(future)
        except asyncio.CancelledError:
            if is_late:
                raise TimeoutError(f"no thread was free for {max_wait_s:g} s") from None
            raise
        finally:
            timer.cancel()

    def _add(self, future: Future[Any], call: Callable[[], Any]) -> None:
        with self._changed:
            self._waiting.append((future, call))
            if self._num_idle >= len(self._waiting) or self._num_live >= self._num_threads:
                self._changed.notify()
                return
            self._num_live += 1
        try:
            start_native(self._work, f"pagespec-{self._name}", self._close)
        except RuntimeError:
            with self._changed:
                self._num_live -= 1
                has_none = not self._num_live
            if has_none and future.cancel():
                raise

    def _close(self) -> None:
        """Drop queued work, and end the threads after their current work."""
        self._is_closing.set()
        with self._changed:
            self._waiting.clear()
            self._changed.notify_all()

    def _work(self) -> None:
        while (taken := self._take()) is not None:
            future, call = taken
            began = time.thread_time()
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(call())
                except BaseException as error:
                    future.set_exception(error)
            del taken, future, call  # they may hold megabytes while the thread is idle
            if self._rest_per_work:
                self._is_closing.wait(self._rest_per_work * (time.thread_time() - began))

    def _take(self) -> tuple[Future[Any], Callable[[], Any]] | None:
        with self._changed:
            while not self._waiting:
                is_in_time = False
                if not self._is_closing.is_set():
                    self._num_idle += 1
                    is_in_time = self._changed.wait(_IDLE_S)
                    self._num_idle -= 1
                if not is_in_time and not self._waiting:
                    self._num_live -= 1
                    return None
            return self._waiting.popleft()


# Tasks of milliseconds: a chat template, a text of some pages, an answer to serialise.
SHORT = Lane("short", min(8, _NUM_CPUS + 2))
# Texts of megabytes, one after another. A tokenizer holds the GIL only briefly.
LONG = Lane("long", max(1, _NUM_CPUS // 4), rest_per_work=_REST)
# Compilation of constraints: small ones do not wait for large ones.
SMALL_CONSTRAINTS = Lane("constraints", 2)
LARGE_CONSTRAINTS = Lane("large-constraints", max(1, _NUM_CPUS // 4), rest_per_work=_REST)
# Parsing of bodies, one thread per lane: bodies of 100 kB would otherwise take all threads of
# chats, and wait for a body of 10 MB.
BODIES = Lane("bodies", 1, rest_per_work=1.0)
LARGE_BODIES = Lane("large-bodies", 1, rest_per_work=2.0)

Work = Literal["text", "body", "constraint"]
# By type of work: lanes, each with its maximum length in bytes or characters.
_LANES: dict[Work, tuple[tuple[float, Lane], ...]] = {
    "text": ((1 << 18, SHORT), (math.inf, LONG)),
    "body": ((1 << 19, BODIES), (math.inf, LARGE_BODIES)),
    "constraint": ((1 << 12, SMALL_CONSTRAINTS), (math.inf, LARGE_CONSTRAINTS)),
}


def lane_of(work: Work, length: int) -> Lane:
    """The lane for work of this type and length, in bytes or characters."""
    return next(lane for longest, lane in _LANES[work] if length <= longest)


def is_quick(items: Sequence[tuple[Any, Any]], num_requests: int, num_chars: int) -> bool:
    """Whether reading prompts and making their requests takes less time than a hand-over to another
    thread.

    Args:
        items: prompts with their sampling parameters.
        num_chars: the sum of :func:`num_chars_to_read`.
    """
    if num_requests > _MAX_QUICK or num_chars > _SHORT_TEXT:
        return False
    return not any(
        isinstance(params, SamplingParams)
        and (
            params.bad_words
            or len(params.allowed_token_ids or ()) > _SHORT_TEXT
            or len(params.stop_token_ids or ()) > _SHORT_TEXT
        )
        for _, params in items
    )


def _num_ids(segment: Any) -> int:
    ids = segment.get("prompt_token_ids", ()) if isinstance(segment, Mapping) else ()
    return 1 + (len(ids) if is_list(ids) else 0)


def num_chars_to_read(prompt: Any) -> int:
    """The characters of a text to tokenise; for token ids, a number with the same cost."""
    if isinstance(prompt, Mapping):
        if is_list(prompt.get("segments")):
            return sum(map(_num_ids, prompt["segments"])) // _NUM_IDS_PER_CHAR
        prompt = prompt.get("prompt", prompt.get("prompt_token_ids"))
    if isinstance(prompt, str):
        return len(prompt)
    return len(prompt) // _NUM_IDS_PER_CHAR if is_list(prompt) else 0
