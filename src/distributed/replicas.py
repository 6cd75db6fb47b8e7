"""A pool of replicas: Ray actors that do the same work. They receive chunks of items, and results
come in order.

If a replica ends, others repeat its unfinished rows. A row that ends several replicas is given up.
The module does not depend on models.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from itertools import islice
from typing import Any

from ..errors import EngineError, PagespecError

MAX_STARTS = 3
"""Consecutive failed starts of a replica after which the others continue without it."""
_SUSPECT_LOSSES = 2
"""Lost replicas of a chunk after which the chunk runs alone in a replica."""
_WAIT_S = 5.0

Work = Callable[[Sequence[Any]], Sequence[Any]]
"""Maps items to results, one for each."""


class _Replica:
    """The actor: creates its work function once, and applies it to one chunk per thread."""

    def __init__(self, make: Callable[[], Work]) -> None:
        self._make = make
        self._work: Work | None = None

    def start(self) -> str | None:
        """Return the refusal as text: not every exception can be pickled."""
        try:
            self._work = self._make()
        except (PagespecError, OSError) as error:
            return str(error) or type(error).__name__
        return None

    def do(self, items: Sequence[Any]) -> Sequence[Any]:
        assert self._work is not None
        return self._work(items)


@dataclass(slots=True, eq=False)
class _Chunk:
    """Rows that are sent together. ``num_losses``: number of replicas that ended while processing
    it."""

    first: int
    items: list[Any]
    num_losses: int = 0

    @property
    def is_suspect(self) -> bool:
        """A suspect runs alone in a replica, so the next loss identifies the cause."""
        return self.num_losses >= _SUSPECT_LOSSES

    def after_loss(self) -> list[_Chunk]:
        """The next attempts: the chunk, or each row of a suspect; none for a suspect row."""
        losses = self.num_losses + 1
        if not self.is_suspect:
            return [_Chunk(self.first, self.items, losses)]
        if len(self.items) == 1:
            return []
        return [_Chunk(self.first + i, [item], losses) for i, item in enumerate(self.items)]


@dataclass(slots=True, eq=False)
class _Slot:
    """A replica's slot: its current actor, whether that has started, and its chunks."""

    actor: Any = None
    is_ready: bool = False
    num_failed_starts: int = 0
    chunks: list[_Chunk] = field(default_factory=list)

    def takes_more(self, num_chunks: int) -> bool:
        is_full = len(self.chunks) >= num_chunks or any(c.is_suspect for c in self.chunks)
        return self.is_ready and not is_full


@dataclass(eq=False)
class ReplicaPool:
    """Replicas on a Ray cluster that this process is connected to.

    Attributes:
        make: called once in each actor. It must be picklable, and so must items and results.
        give_up: creates the result of a given-up item, from the item and the reason.
        resources: of one actor, in the form that ``ray.remote`` takes.
        has_room: whether the cluster, in its present state, could run one replica.
        chunk_size: items per chunk.
        num_chunks: chunks that a replica processes at a time, each in a thread.
        note: called with messages about replicas.
    """

    make: Callable[[], Work]
    give_up: Callable[[Any, str], Any]
    _: KW_ONLY
    num_replicas: int
    resources: Mapping[str, float]
    has_room: Callable[[], bool]
    chunk_size: int
    num_chunks: int
    note: Callable[[str], None]

    def __post_init__(self) -> None:
        self._ray = import_ray()
        self._actor_class = self._ray.remote(_Replica).options(
            **self.resources, max_concurrency=self.num_chunks, max_restarts=0
        )
        self._slots = [_Slot() for _ in range(self.num_replicas)]
        self._waiting: dict[Any, tuple[_Slot, _Chunk | None]] = {}  # by Ray's reference
        self._again: deque[_Chunk] = deque()
        self._suspects: deque[_Chunk] = deque()
        self._done: dict[int, Sequence[Any]] = {}
        self._num_taken = 0
        self._num_given = 0
        self._losses_in_a_row = 0

    def start(self) -> None:
        """Start all, and wait for the first.

        Raises:
            PagespecError: the first replica was refused, or all failed.
        """
        for slot in self._slots:
            self._start(slot)
        while not any(slot.is_ready for slot in self._slots):
            self._settle()

    def map(self, items: Iterable[Any]) -> Iterator[Any]:
        """Results in the order of ``items``, each exactly once.

        Raises:
            PagespecError: no replica is left, or they end faster than they answer.
        """
        source = iter(items)
        while True:
            while (results := self._done.pop(self._num_given, None)) is not None:
                self._num_given += len(results)
                yield from results
            self._hand_out(source)
            if self._num_given == self._num_taken and not self._take(source):
                return
            self._settle()

    def close(self) -> None:
        for slot in self._slots:
            if slot.actor is not None:
                self._ray.kill(slot.actor)

    # Chunks -----------------------------------------------------------------------------------

    def _take(self, source: Iterator[Any]) -> bool:
        """Take one more chunk from the source, unless too many results wait for an earlier one."""
        room = 4 * len(self._slots) * self.num_chunks * self.chunk_size
        if self._num_taken - self._num_given >= room:
            return False
        items = list(islice(source, self.chunk_size))
        if items:
            self._again.append(_Chunk(self._num_taken, items))
            self._num_taken += len(items)
        return bool(items)

    def _hand_out(self, source: Iterator[Any]) -> None:
        """Assign chunks to the replicas with the fewest."""
        while ready := [slot for slot in self._slots if slot.takes_more(self.num_chunks)]:
            slot = min(ready, key=lambda slot: len(slot.chunks))
            if self._suspects:
                # Send no other chunk meanwhile, so that a replica becomes free.
                if slot.chunks:
                    return
                self._send(slot, self._suspects.popleft())
            elif self._again or self._take(source):
                self._send(slot, self._again.popleft())
            else:
                return

    def _send(self, slot: _Slot, chunk: _Chunk) -> None:
        slot.chunks.append(chunk)
        self._waiting[slot.actor.do.remote(chunk.items)] = slot, chunk

    # Replicas ---------------------------------------------------------------------------------

    def _start(self, slot: _Slot) -> None:
        slot.actor = self._actor_class.remote(self.make)
        self._waiting[slot.actor.start.remote()] = slot, None

    def _settle(self) -> None:
        """Wait some seconds for the next result of a replica."""
        ready, _ = self._ray.wait(list(self._waiting), timeout=_WAIT_S)
        if not ready and not any(slot.is_ready for slot in self._slots) and not self.has_room():
            raise PagespecError("no replica is left, and the cluster has no room for one")
        for reference in ready:
            # A lost actor removes its other references.
            if reference in self._waiting:
                self._settle_one(reference)

    def _settle_one(self, reference: Any) -> None:
        slot, chunk = self._waiting.pop(reference)
        try:
            result = self._ray.get(reference)
        except self._ray.exceptions.RayError as error:
            if isinstance(error, self._ray.exceptions.RayTaskError) and not isinstance(
                error, EngineError
            ):
                raise
            self._lose(slot, chunk, _reason(error))
            return
        if chunk is not None:
            slot.chunks.remove(chunk)
            self._done[chunk.first] = result
            self._losses_in_a_row = 0
        elif result is None:
            slot.is_ready, slot.num_failed_starts = True, 0
        elif not self._has_started():
            raise PagespecError(result)
        else:
            self._lose(slot, None, result)

    def _has_started(self) -> bool:
        return self._num_taken > 0 or any(slot.is_ready for slot in self._slots)

    def _lose(self, slot: _Slot, chunk: _Chunk | None, reason: str) -> None:
        """Replace a replica that has ended or failed, and repeat its chunks."""
        self._ray.kill(slot.actor)
        chunks = sorted(slot.chunks, key=lambda chunk: chunk.first, reverse=True)
        self._waiting = {r: w for r, w in self._waiting.items() if w[0] is not slot}
        slot.actor, slot.is_ready, slot.chunks = None, False, []
        num_rows = sum(len(lost.items) for lost in chunks)
        self.note(f"a replica has ended, with {num_rows} unfinished rows: {reason}")
        for lost in chunks:
            self._do_again(lost, reason)
        self._losses_in_a_row += 1
        if self._losses_in_a_row > 3 * len(self._slots) + 5:
            limit = f"{self._losses_in_a_row} replicas have ended since the last answer"
            raise PagespecError(f"{limit}; of the last: {reason}")
        slot.num_failed_starts += chunk is None
        if slot.num_failed_starts < MAX_STARTS:
            self._start(slot)
        elif any(other.actor is not None for other in self._slots):
            self.note(f"continuing without it after {MAX_STARTS} failed starts")
        else:
            raise PagespecError(f"no replica starts: {reason}")

    def _do_again(self, lost: _Chunk, reason: str) -> None:
        chunks = lost.after_loss()
        if not chunks:
            why = f"given up: {lost.num_losses + 1} replicas ended while processing it"
            self._done[lost.first] = [self.give_up(lost.items[0], f"{why} ({reason})")]
        for chunk in reversed(chunks):
            (self._suspects if chunk.is_suspect else self._again).appendleft(chunk)


def import_ray() -> Any:
    """Import Ray.

    Raises:
        PagespecError: it is not installed.
    """
    try:
        import ray
    except ImportError as error:
        raise PagespecError(f"replicas need Ray ({error}): pip install 'pagespec[ray]'") from error
    return ray


def _reason(error: Exception) -> str:
    """The line of Ray's error that gives the cause."""
    cause = getattr(error, "cause", None)
    text = str(cause if isinstance(cause, EngineError) else error)
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    causes = [line for line in lines if line.startswith("The actor is dead because")]
    if lines and "error raised in its creation task" in lines[0]:
        causes = lines[-1:]  # after a traceback, for example for a missing package
    line = (causes or lines or [type(error).__name__])[0]
    return line.partition(" Some common causes")[0]
