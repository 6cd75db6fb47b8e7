"""Client of the compile worker, which compiles Triton kernels in another process.

A fifth of a compilation holds the GIL, so threads scale to about five kernels at a time, and to
fewer while the main thread works. A process costs imports, which take seconds. So there is one
worker process (:mod:`.compile_worker`), started in advance, whose forks compile. It does not use
the GPU. Its results are found in Triton's cache on disk.
"""

from __future__ import annotations

import logging
import multiprocessing
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from multiprocessing.connection import Connection
from typing import Any

from triton.runtime import driver

logger = logging.getLogger("pagespec")

# A kernel takes seconds; a worker that is silent for this long has failed.
_PATIENCE_S = 120.0


class Compilers:
    """Starts and stops one compile worker, sends it kernels and counts its answers."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._answers: Connection
        self._num_requested = 0

    @property
    def is_running(self) -> bool:
        return self._process is not None

    def start(self) -> None:
        """Start the worker, which imports its modules while this process continues."""
        if self._process is not None or sys.platform == "win32":
            return
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path),
            # It computes only on a CPU, one thread per process.
            "CUDA_VISIBLE_DEVICES": "",
            "OMP_NUM_THREADS": "1",
        }
        try:
            self._answers, theirs = multiprocessing.Pipe()
            with theirs:
                # Not with multiprocessing, which would run the user's main module again.
                self._process = subprocess.Popen(
                    [
                        *(sys.executable, "-P", "-m", "pagespec.kernels.jit.compile_worker"),
                        str(theirs.fileno()),
                    ],
                    pass_fds=[theirs.fileno()],
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,
                    env=environment,
                )
        except OSError as error:
            logger.info("kernels are compiled in this process: %s", error)

    def ask(self, kernel: Any, form: str) -> None:
        """Request the compilation of a kernel to disk for the current GPU, and continue.

        Args:
            kernel: a Triton function. form: its signature in the format of Triton's hooks.
        """
        if self._process is None:
            return
        name = kernel.fn.__module__, kernel.fn.__qualname__
        try:
            self._answers.send((driver.active.get_current_target(), *name, form))
            self._num_requested += 1
        except OSError as error:
            self._give_up(error)

    def wait(self) -> int:
        """Wait until all requested kernels are compiled, if possible.

        Returns:
            The number of kernels compiled since the last call. Others were already cached, or
            failed.
        """
        answers: list[bool | None] = []
        try:
            for _ in range(self._num_requested):
                if not self._answers.poll(_PATIENCE_S):
                    raise TimeoutError(f"no answer for {_PATIENCE_S} s")
                answers.append(self._answers.recv())
        except (OSError, EOFError) as error:
            self._give_up(error)
            return 0
        self._num_requested = 0
        if None in answers:
            logger.info("%d kernels were not compiled by another process", answers.count(None))
        return answers.count(True)

    def _give_up(self, error: Exception) -> None:
        logger.info("kernels are compiled in this process: %r", error)
        self.stop()

    def stop(self) -> None:
        """End the process and its running compilations at once."""
        process, self._process = self._process, None
        self._num_requested = 0
        if process is not None:
            process.kill()
            self._answers.close()
            process.wait()


_CURRENT: ContextVar[Compilers | None] = ContextVar("compilers", default=None)


@contextmanager
def compilers() -> Iterator[Compilers]:
    """Within the context :func:`current_compilers` returns the yielded object, which is not started
    yet."""
    made = Compilers()
    token = _CURRENT.set(made)
    try:
        yield made
    finally:
        _CURRENT.reset(token)
        made.stop()


def current_compilers() -> Compilers | None:
    """The object of the context in which this is called."""
    return _CURRENT.get()
