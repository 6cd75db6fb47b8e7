"""Run the ranks of a group inside one test: as threads, or as forked processes.

Forked processes share memory.
"""

from __future__ import annotations

import multiprocessing
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from pagespec.kernels.collectives.communicator import LoneRank


class Exchange:
    """An all-gather among threads."""

    def __init__(self, num_ranks: int) -> None:
        self.barrier = threading.Barrier(num_ranks)
        self.parts: list[Any] = [None] * num_ranks

    def all(self, rank: int, part: Any) -> list[Any]:
        """The parts of all ranks, by rank."""
        self.parts[rank] = part
        self.barrier.wait(60)
        parts = list(self.parts)
        self.barrier.wait(60)
        return parts


class ThreadCommunicator(LoneRank):
    """A communicator over threads. Its sums do not use the code under test."""

    def __init__(self, rank: int, exchange: Exchange) -> None:
        super().__init__(rank, len(exchange.parts))
        self._exchange = exchange
        self.num_calls = 0

    def all_reduce(self, partial: Tensor) -> Tensor:
        self.num_calls += 1
        parts = self._exchange.all(self.rank, partial)
        return torch.stack([part.double() for part in parts]).sum(0).to(partial.dtype)

    def all_gather(self, part: Tensor, sizes: Sequence[int]) -> Tensor:
        self.num_calls += 1
        parts = self._exchange.all(self.rank, part)
        assert [p.shape[-1] for p in parts] == list(sizes)
        return torch.cat(parts, -1)


def run_threads(num_ranks: int, function: Callable[[ThreadCommunicator], Any]) -> list[Any]:
    """The results of ``function`` on each rank; raises the first exception of any rank."""
    exchange = Exchange(num_ranks)
    results: list[Any] = [None] * num_ranks
    errors: list[BaseException] = []

    def run(rank: int) -> None:
        try:
            results[rank] = function(ThreadCommunicator(rank, exchange))
        except BaseException as error:
            errors.append(error)
            exchange.barrier.abort()

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(num_ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return results


def shared(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Zeros that forked processes share, at the same address."""
    return torch.zeros(*shape, dtype=dtype).share_memory_()


def fork_ranks(num_ranks: int, function: Callable[[int], None]) -> None:
    """Run ``function(rank)`` in one process per rank, because Triton's interpreter is not
    thread-safe. Fails unless all processes exit with 0."""
    context = multiprocessing.get_context("fork")
    processes = [context.Process(target=function, args=(rank,)) for rank in range(num_ranks)]
    for process in processes:
        process.start()
    end = time.monotonic() + 120
    while time.monotonic() < end and any(process.exitcode is None for process in processes):
        if any(process.exitcode for process in processes):  # the others may wait for it
            break
        time.sleep(0.02)
    codes = [process.exitcode for process in processes]
    for process in processes:
        process.kill()
    assert codes == [0] * num_ranks, codes
