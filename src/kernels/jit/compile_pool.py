"""Client of the compile worker: compiles Triton kernels in another process.

A fifth of a compilation holds Python's lock, so threads do not get far beyond five kernels at a
time, and not even there while the main thread has work of its own. A process costs imports, which
take seconds, and so there is one (:mod:`.compile_worker`), started before it is
needed, that forks. It has never seen the GPU; what it makes is found in Triton's cache on disk.
"""

from __future__ import annotations

import json
import logging
import os
import select
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from typing import Any

from triton.runtime import driver

logger = logging.getLogger("pagespec")

# A kernel takes seconds; a worker silent for so long has failed.
_PATIENCE_S = 120.0
COMPILED, FOUND, FAILED = 0, 1, 2  # what became of a kernel that was asked for


class Compilers:
    """The process, and what it is asked for."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._num_asked = 0

    @property
    def is_running(self) -> bool:
        return self._process is not None

    def start(self) -> None:
        """Let it import what it needs, while this process goes on."""
        if self._process is not None or sys.platform == "win32":
            return
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path),
            # It only computes on a CPU, one thread a process.
            "CUDA_VISIBLE_DEVICES": "",
            "OMP_NUM_THREADS": "1",
        }
        command = [sys.executable, "-P", "-m", "pagespec.kernels.jit.compile_worker"]
        try:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                env=environment,
            )
        except OSError as error:
            logger.info("kernels are compiled in this process: %s", error)

    def ask(self, kernel: Any, form: str) -> None:
        """Let a kernel be compiled to the disk for the current GPU, while this process goes on.

        Args:
            kernel: Triton's function. form: as Triton's hooks name it.
        """
        if self._process is None:
            return
        target = driver.active.get_current_target()
        of_target = target.backend, target.arch, target.warp_size
        name = kernel.fn.__module__, kernel.fn.__qualname__
        request = json.dumps([self._num_asked, of_target, *name, form]).encode() + b"\n"
        try:
            assert self._process.stdin is not None
            self._process.stdin.write(request)
            self._process.stdin.flush()
        except OSError as error:
            self._give_up(error)
        else:
            self._num_asked += 1

    def wait(self) -> int:
        """Until all that was asked for has been compiled, as far as that works.

        Returns:
            How many were compiled since the last call; others were there, or are still not.
        """
        if self._process is None:
            return 0
        number, self._num_asked = self._num_asked, 0
        try:
            statuses = self._answers(number)
        except (OSError, EOFError, ValueError) as error:
            self._give_up(error)
            return 0
        num_failed = sum(status not in (COMPILED, FOUND) for status in statuses)
        if num_failed:
            logger.info("%d kernels were not compiled by another process", num_failed)
        return statuses.count(COMPILED)

    def _answers(self, number: int) -> list[int]:
        assert self._process is not None
        assert self._process.stdout is not None
        received = b""
        while received.count(b"\n") < number:
            if not select.select([self._process.stdout], [], [], _PATIENCE_S)[0]:
                raise TimeoutError(f"no answer for {_PATIENCE_S} s")
            part = os.read(self._process.stdout.fileno(), 1 << 16)
            if not part:
                raise EOFError("the compiling process has ended")
            received += part
        return [json.loads(line)[1] for line in received.splitlines()]

    def _give_up(self, error: Exception) -> None:
        logger.info("kernels are compiled in this process: %s", error)
        self.stop()

    def stop(self) -> None:
        """End the process, at once. What it still compiles ends by itself."""
        process, self._process = self._process, None
        self._num_asked = 0
        if process is not None:
            process.kill()
            for pipe in (process.stdin, process.stdout):
                with suppress(OSError):  # what was not sent yet is lost
                    pipe.close()  # type: ignore[union-attr]
            process.wait()


_CURRENT: ContextVar[Compilers | None] = ContextVar("compilers", default=None)


@contextmanager
def compilers() -> Iterator[Compilers]:
    """Another process for kernels that this thread asks for in the block, once it is started."""
    made = Compilers()
    token = _CURRENT.set(made)
    try:
        yield made
    finally:
        _CURRENT.reset(token)
        made.stop()


def current_compilers() -> Compilers | None:
    """Those of the block this is called in."""
    return _CURRENT.get()
