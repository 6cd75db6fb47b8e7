"""The shared memory of a group: a status cell per rank, and the bytes of the steps in flight.

It is an unnamed file that every process maps::

    | cell of rank 0 | cell of rank 1 | ... | slot 0 | slot 1 | ... | slot K - 1 |

Only rank 0 writes slots. Step n is in slot ``n % K``, which is overwritten only after every rank
has finished the step. Each rank writes its own cell, and all ranks read all cells. A step consists
of arrays, so nothing is pickled: a slot contains their dtypes and shapes, then their bytes.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import tempfile
import weakref
import zlib
from collections.abc import Callable, Sequence
from enum import IntEnum
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

_WORDS = ("state", "num_started", "num_finished", "num_collectives", "digest")
_TEXT_BYTES = 8192 - 8 * len(_WORDS)
_DTYPES = tuple(map(np.dtype, (np.int32, np.int64, np.float32, np.bool_)))
_ALIGNMENT = 16
_T = TypeVar("_T")


class State(IntEnum):
    """The progress of a rank's start."""

    STARTING = 0
    IMPORTED = 1
    BUILT = 2
    FAILED = 3


class Cell(ctypes.Structure):
    """The status of one rank, in shared memory.

    Attributes:
        state: a :class:`State`. num_started, num_finished: steps. num_collectives: number of calls
            begun.
        digest: of all its steps.
    """

    _fields_ = (
        *((name, ctypes.c_int64) for name in _WORDS),
        ("_text", ctypes.c_char * _TEXT_BYTES),
    )

    @property
    def text(self) -> str:
        """The error of a failed rank."""
        return bytes(self._text).decode(errors="replace")

    @text.setter
    def text(self, value: str) -> None:
        self._text = value.encode()[:_TEXT_BYTES]


class Channel:
    """The shared file, as mapped by one process.

    Args:
        num_ranks: of the group.
        descriptor: of the file; None creates a new one.
    """

    def __init__(self, num_ranks: int, descriptor: int | None = None) -> None:
        self._begin = num_ranks * ctypes.sizeof(Cell)
        if descriptor is None:
            with tempfile.TemporaryFile() as file:
                descriptor = os.dup(file.fileno())
            os.ftruncate(descriptor, self._begin)
            weakref.finalize(self, os.close, descriptor)
        self.descriptor = descriptor
        self.cells = (Cell * num_ranks).from_buffer(mmap.mmap(descriptor, self._begin))
        self._slots: list[memoryview] = []

    def make_slots(self, num_slots: int, num_bytes: int) -> None:
        """Allocate slots for steps of at most ``num_bytes``. A page uses memory once it is
        written."""
        size = -(-num_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
        if os.fstat(self.descriptor).st_size < self._begin + num_slots * size:
            os.ftruncate(self.descriptor, self._begin + num_slots * size)
        whole = memoryview(mmap.mmap(self.descriptor, 0))[self._begin :]
        self._slots = [whole[i * size : (i + 1) * size] for i in range(num_slots)]

    @property
    def num_slots(self) -> int:
        return len(self._slots)

    def write(self, step: int, arrays: Sequence[NDArray[Any]]) -> None:
        """Put a step into its slot.

        Raises:
            ValueError: the step is larger than a slot.
        """
        slot = self._slots[step % len(self._slots)]
        header = [len(arrays)]
        for array in arrays:
            header += [_DTYPES.index(array.dtype), array.ndim, *array.shape]
        at = _aligned(8 * len(header))
        num_bytes = at + sum(_aligned(array.nbytes) for array in arrays)
        if num_bytes > len(slot):
            raise ValueError(f"a step of {num_bytes} bytes for a slot of {len(slot)}")
        slot[: 8 * len(header)] = np.array(header, np.int64).tobytes()
        for array in arrays:
            slot[at : at + array.nbytes] = array.tobytes()
            at += _aligned(array.nbytes)

    def read(self, step: int) -> list[NDArray[Any]]:
        """The arrays of a step, copied out of its slot."""
        slot = self._slots[step % len(self._slots)]
        words = slot.cast("q")
        shapes, at = [], 1
        for _ in range(words[0]):
            ndim = words[at + 1]
            shapes.append((_DTYPES[words[at]], tuple(words[at + 2 : at + 2 + ndim])))
            at += 2 + ndim
        arrays, at = [], _aligned(8 * at)
        for dtype, shape in shapes:
            array = np.empty(shape, dtype)
            array.reshape(-1).view(np.uint8)[:] = slot[at : at + array.nbytes]
            arrays.append(array)
            at += _aligned(array.nbytes)
        return arrays

    def run(self, rank: int, step: int, launch: Callable[[list[NDArray[Any]]], _T]) -> _T:
        """Launch one step on this rank, and count it in its cell: before, and after."""
        cell, arrays = self.cells[rank], self.read(step)
        cell.digest = digest_of(step, arrays, cell.digest)
        cell.num_started = step + 1
        handle = launch(arrays)
        cell.num_finished = step + 1
        return handle


def digest_of(step: int, arrays: list[NDArray[np.generic]], before: int) -> int:
    """A checksum of a rank's steps so far, to verify that all ranks run the same steps (R1). The
    upper half of the word is the number of the step: other ranks read both at once."""
    checksum = before & 0xFFFFFFFF
    for array in arrays:
        checksum = zlib.crc32(array.tobytes(), checksum)
    return (step + 1 & 0x7FFFFFFF) << 32 | checksum


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGNMENT) * _ALIGNMENT
