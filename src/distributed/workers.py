"""Rank 0's handle of the worker processes: start, send steps, watch, end.

A worker reads the numbers of steps from its standard input: n to launch step n, and the complement
-n - 1 to replay it. At the end of that stream, also after a
crash of rank 0, the worker ends. So no process is left running.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from ..errors import EngineError, InvalidInputError, PagespecError, UnsupportedModelError, shortened
from .channel import Channel, State

_STALL_S = 20.0
"""Seconds without progress in a step after which a rank counts as hanging."""
_LAST_WORDS_S = 2.0
"""Seconds to wait for the error of a rank after its connections have closed."""
_POLL_S, _MAX_POLL_S = 0.02, 1.0
_MAX_TEXT = 400
"""Characters of a part of an error, so that all parts fit into a cell after escaping."""
_ERRORS: dict[str, type[PagespecError]] = {
    "InvalidInputError": InvalidInputError,
    "UnsupportedModelError": UnsupportedModelError,
}


class Workers:
    """Ranks 1, 2, ... of a group.

    Args:
        channel: shared with the workers.
        num_ranks: of the group, rank 0 included.
    """

    def __init__(self, channel: Channel, num_ranks: int) -> None:
        self._channel = channel
        self._processes: list[subprocess.Popen[bytes]] = []
        path = os.pathsep.join(entry or os.getcwd() for entry in sys.path)
        try:
            for rank in range(1, num_ranks):
                arguments = [str(number) for number in (rank, num_ranks, channel.descriptor)]
                self._processes.append(
                    subprocess.Popen(
                        [sys.executable, "-P", "-m", "pagespec.distributed.worker", *arguments],
                        stdin=subprocess.PIPE,
                        pass_fds=[channel.descriptor],
                        # Ctrl-C is handled by rank 0.
                        start_new_session=True,
                        env={**os.environ, "PYTHONPATH": path, "TQDM_DISABLE": "1"},
                    )
                )
        except BaseException:
            self.end()
            raise

    @property
    def pids(self) -> list[int]:
        """The process ids of ranks 1, 2, ..."""
        return [process.pid for process in self._processes]

    def send_settings(self, settings: Mapping[str, Any]) -> None:
        """Send the settings of the build."""
        encoded = json.dumps(settings).encode()
        self._send(len(encoded).to_bytes(8, "little") + encoded)

    def send_step(self, step: int, *, is_replayed: bool = False) -> None:
        """Start the step whose data is in its slot.

        Args:
            is_replayed: it is computed for its duration only.

        Raises:
            EngineError: a worker has ended.
        """
        self._send((~step if is_replayed else step).to_bytes(8, "little", signed=True))

    def _send(self, message: bytes) -> None:
        for rank, process in enumerate(self._processes, 1):
            assert process.stdin is not None
            try:
                process.stdin.write(message)
                process.stdin.flush()
            except (OSError, ValueError) as error:
                self.check()
                raise EngineError(f"rank {rank} does not read its input: {error}") from error

    def wait_for(self, state: State, timeout_s: float) -> None:
        """Wait until all workers have reached a state.

        Raises:
            InvalidInputError, UnsupportedModelError: a worker refused a setting or the model.
            EngineError: a worker has ended, or needs longer than ``timeout_s``.
        """
        begin = time.monotonic()
        while any(cell.state < state for cell in self._channel.cells[1:]):
            self.check()
            if time.monotonic() - begin > timeout_s:
                late = [r for r, c in enumerate(self._channel.cells) if r and c.state < state]
                raise EngineError(f"ranks {late} were not {state.name} after {timeout_s:.0f} s")
            time.sleep(_POLL_S)
        self.check()

    def check(self) -> None:
        """Raise the error that ended a rank, if one has ended."""
        for rank, cell in enumerate(self._channel.cells):
            if cell.state == State.FAILED:
                raise _error_of(rank, cell.text)
        for rank, process in enumerate(self._processes, 1):
            code = process.poll()
            if code is not None:
                how = f"by signal {-code}" if code < 0 else f"with exit code {code}"
                raise EngineError(f"rank {rank} (process {process.pid}) has ended {how}")

    def reason_of(self, error: BaseException) -> BaseException:
        """The error of a rank, if it caused ``error`` on rank 0; else the error itself."""
        end = time.monotonic() + (_LAST_WORDS_S if isinstance(error, Exception) else 0)
        while True:
            try:
                self.check()
            except PagespecError as reason:
                # A refusal by all ranks names no rank.
                return error if str(reason).startswith(str(error)) else reason
            if time.monotonic() >= end:
                return error
            time.sleep(_POLL_S)

    def stopped(self) -> list[tuple[int, int]]:
        """Ranks whose processes a signal or a debugger has stopped, with their process ids."""
        return [(rank, pid) for rank, pid in enumerate(self.pids, 1) if _is_stopped(pid)]

    def end(self) -> None:
        """End all, at once; may be called again."""
        for process in self._processes:
            with suppress(OSError):
                process.kill()
        for process in self._processes:
            with suppress(OSError, subprocess.TimeoutExpired):
                process.wait(5)
            if process.stdin is not None:
                with suppress(OSError, ValueError):
                    process.stdin.close()


class Watch:
    """Waits for a step of the group while the group makes progress."""

    def __init__(self, workers: Workers, channel: Channel) -> None:
        self._workers, self._channel = workers, channel
        self._seen: list[tuple[int, int, int]] = []

    def wait(self, is_done: Callable[[float], bool]) -> None:
        """Call ``is_done``, with the seconds that it may wait, until it returns True.

        Raises:
            EngineError: a rank has ended, or hangs; the message names it.
        """
        stalled_s, last = 0.0, time.monotonic()
        while not is_done(_POLL_S):
            self._workers.check()
            seen = [
                (cell.num_started, cell.num_collectives, cell.num_finished)
                for cell in self._channel.cells
            ]
            now = time.monotonic()
            # A stop of this process itself (Ctrl-Z) does not count.
            stalled_s += min(now - last, _MAX_POLL_S)
            last = now
            if seen != self._seen:
                self._seen, stalled_s = seen, 0.0
            elif stalled_s > _STALL_S:
                raise EngineError(self._stall(seen))

    def _stall(self, seen: Sequence[tuple[int, int, int]]) -> str:
        """The ranks that delay the group. A stopped rank may have reached the same point as the
        waiting ranks, or a later one: its last message may be lost."""
        stopped = dict(self._workers.stopped())
        late = list(stopped) or [rank for rank, far in enumerate(seen) if far == min(seen)]
        names = f"rank {late[0]} has" if len(late) == 1 else f"ranks {late} have"
        processes = ", ".join(f"process {pid}" for pid in stopped.values())
        why = f": {processes} was stopped by a signal" if stopped else ""
        return f"{names} made no progress for {_STALL_S:.0f} s{why}"


def _is_stopped(pid: int) -> bool:
    try:
        status = Path(f"/proc/{pid}/stat").read_text()
    except OSError:  # the process is gone, or this is not Linux
        return False
    return status.rpartition(")")[2].split()[0] in ("T", "t")


def describe_error(error: BaseException) -> str:
    """An error as text for a rank's cell."""
    fields = None
    if isinstance(error, InvalidInputError):
        value = error.value
        if value is not None and not isinstance(value, (bool, int, float)):
            value = shortened(value if isinstance(value, str) else repr(value), _MAX_TEXT)
        fields = [error.field, value, shortened(error.limit, _MAX_TEXT)]
    return json.dumps([type(error).__name__, shortened(str(error), _MAX_TEXT), fields])


def _error_of(rank: int, text: str) -> PagespecError:
    try:
        name, message, fields = json.loads(text)
    except ValueError:
        return EngineError(f"rank {rank} has failed: {text}")
    if name == "InvalidInputError" and fields is not None:
        return InvalidInputError(fields[0], fields[1], f"{fields[2]} (rank {rank})")
    if name in _ERRORS:
        return _ERRORS[name](f"{message} (rank {rank})")
    return EngineError(f"rank {rank} has failed: {name}: {message}")
