"""A stretch of a graph that calls native kernels and takes views: recorded once, then replayed.

A call from Python costs about as much as its computation for one row. So the first step of a shape
runs node by node while the calls are recorded with their arguments. Later steps of that shape make
the same calls in one call into C, on the same buffers. Only the addresses that belong to the step
are replaced: its inputs, its results, and the width of its block tables.
"""

from __future__ import annotations

import ctypes
import struct
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, Node
from torch.fx.node import map_arg
from torch.utils._pytree import tree_leaves

from .calls import TableWidth, attention, recording
from .library import ARGUMENTS, library

_MOST_TOKENS = 64
"""Longer steps compute so much that the cost of calls does not matter."""
_MOST_RECORDINGS = 64
_MOST_ARGUMENTS = 30
_TABLES_ARGUMENT = 5  # of attention
_FUNCTIONS = {name: number for number, name in enumerate(ARGUMENTS)}


class _Call(ctypes.Structure):
    _fields_ = (("function", ctypes.c_int64), ("arguments", ctypes.c_int64 * _MOST_ARGUMENTS))


class _Refused(Exception):
    """The recording would not contain everything that happens."""


@dataclass(frozen=True, slots=True)
class _Recording:
    """The calls of a step of one shape.

    Attributes:
        changes: (call, argument, value, offset) each, flat.
        shapes: of the results.
        kept: objects that the calls point to, and objects that the key identifies by identity.
    """

    calls: Any
    num_calls: int
    changes: Any
    num_changes: int
    shapes: tuple[torch.Size, ...]
    kept: tuple[object, ...]


class Stretch:
    """A graph of native calls and views, as a function of its placeholders.

    Args:
        graph: returns a tuple of tensors.
        is_step: per placeholder, whether its value is a tensor of the step. Others are constants,
            caches and sizes.
        name: for the code of the graph that calls it.
    """

    def __init__(self, graph: Graph, is_step: Sequence[bool], name: str) -> None:
        self.graph = graph
        self.__name__ = self.__qualname__ = name
        nodes = list(graph.nodes)
        places = graph.find_nodes(op="placeholder")
        self._places, self._nodes = places, nodes[len(places) : -1]
        self._results: tuple[Node, ...] = nodes[-1].args[0]
        last: dict[Node, Node] = {}
        for node in self._nodes:
            last |= dict.fromkeys(node.all_input_nodes, node)
        self._drops: dict[Node, list[Node]] = {node: [] for node in self._nodes}
        for node, user in last.items():
            if node not in self._results:
                self._drops[user].append(node)
        self._step = [i for i, is_of_step in enumerate(is_step) if is_of_step]
        self._fixed = [i for i, is_of_step in enumerate(is_step) if not is_of_step]
        tables = [n.args[_TABLES_ARGUMENT] for n in self._nodes if n.target is attention]
        self._tables = places.index(tables[0]) if tables else None
        self._recordings: dict[object, _Recording | None] = {}
        self._pool: list[Tensor] = []
        self._lock = threading.Lock()

    def __call__(self, *inputs: Any) -> tuple[Tensor, ...]:
        """The results for these values of the placeholders."""
        step = [inputs[i] for i in self._step]
        if step[0].numel() // step[0].shape[-1] > _MOST_TOKENS:
            return self._run(inputs)
        fixed = [inputs[i] for i in self._fixed]
        key = (
            torch.get_num_threads(),
            tuple([f if isinstance(f, int) else id(f) for f in fixed]),
            tuple(
                [
                    x.shape if i != self._tables else x.shape[:1]
                    for i, x in zip(self._step, step, strict=True)
                ]
            ),
        )
        with self._lock:
            recording = self._recordings.get(key)
            if recording is not None and all(x.is_contiguous() for x in step):
                return self._replayed(recording, inputs, step)
            if key in self._recordings:
                return self._run(inputs)
            while len(self._recordings) >= _MOST_RECORDINGS:
                del self._recordings[next(iter(self._recordings))]
            recorder = _Recorder(self._pool)
            try:
                results = self._run(inputs, recorder)
                self._recordings[key] = recorder.finish(step, self._width(inputs), results, fixed)
            except _Refused:
                self._recordings[key] = None
                return self._run(inputs)
            return results

    def _width(self, inputs: Sequence[Any]) -> int:
        return 0 if self._tables is None else int(inputs[self._tables].shape[1])

    def _replayed(
        self, recording: _Recording, inputs: Sequence[Any], step: Sequence[Tensor]
    ) -> tuple[Tensor, ...]:
        results = tuple([torch.empty(shape) for shape in recording.shapes])
        addresses = [x.data_ptr() for x in (*step, *results)]
        values = (ctypes.c_int64 * (len(addresses) + 1))(*addresses, self._width(inputs))
        kernels = library()
        assert kernels is not None  # the calls were recorded
        kernels.replay(
            recording.calls, recording.num_calls, recording.changes, recording.num_changes, values
        )
        return results

    def _run(self, inputs: Sequence[Any], recorder: _Recorder | None = None) -> tuple[Tensor, ...]:
        values = dict(zip(self._places, inputs, strict=True))
        recording.recorder = recorder
        try:
            for node in self._nodes:
                if recorder is not None:
                    recorder.begin(values, is_result=self._makes_result(node))
                values[node] = _evaluated(node, values.__getitem__)
                if recorder is not None and node.op == "call_method":
                    _check_view(values[node], values[node.args[0]])
                for unused in self._drops[node]:
                    del values[unused]
        finally:
            recording.recorder = None
        return tuple(values[node] for node in self._results)

    def _makes_result(self, node: Node) -> bool:
        return any(place in self._results for place in (node, *node.users))


def _evaluated(node: Node, value_of: Callable[[Node], Any]) -> Any:
    args, kwargs = map_arg(node.args, value_of), map_arg(node.kwargs, value_of)
    if node.op == "call_method":
        return getattr(args[0], str(node.target))(*args[1:], **kwargs)
    return node.target(*args, **kwargs)  # type: ignore[operator]


def _check_view(result: Any, source: Tensor) -> None:
    """Raise _Refused if the method copied."""
    memory = source.untyped_storage().data_ptr()
    for part in tree_leaves(result):
        if isinstance(part, Tensor) and part.untyped_storage().data_ptr() != memory:
            raise _Refused


class _Recorder:
    """Implements :class:`.calls.Recorder`.

    Args:
        pool: buffers shared by all recordings of a stretch, which runs one step at a time.
    """

    def __init__(self, pool: list[Tensor]) -> None:
        self._pool = pool
        self._calls: list[tuple[str, tuple[Any, ...]]] = []
        self._used: set[int] = set()  # addresses of buffers in use
        self._kept: list[Tensor] = []
        self._is_result = False

    def begin(self, values: dict[Node, Any], *, is_result: bool) -> None:
        """Called before a node; ``values`` are still needed."""
        tensors = [leaf for leaf in tree_leaves(list(values.values())) if isinstance(leaf, Tensor)]
        self._used = {t.untyped_storage().data_ptr() for t in tensors if not t.is_mkldnn}
        self._is_result = is_result

    def add(self, name: str, arguments: tuple[Any, ...]) -> None:
        self._calls.append((name, arguments))

    def refuse(self) -> None:
        raise _Refused

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        if self._is_result:
            fresh = torch.empty(shape, dtype=dtype)
            self._kept.append(fresh)
            return fresh
        size = torch.Size(shape).numel() * dtype.itemsize
        free = [
            buffer
            for buffer in self._pool
            if buffer.numel() >= size and buffer.data_ptr() not in self._used
        ]
        if not free:
            free = [torch.empty(size, dtype=torch.uint8)]
            self._pool.append(free[0])
        buffer = min(free, key=Tensor.numel)
        self._used.add(buffer.data_ptr())
        self._kept.append(buffer)
        return buffer[:size].view(dtype).view(shape)

    def finish(
        self, step: Sequence[Tensor], width: int, results: Sequence[Tensor], fixed: Sequence[Any]
    ) -> _Recording:
        """The recording, with these tensors of the step in it.

        Raises:
            _Refused: a tensor of the step is not stored in memory as replays expect it.
        """
        of_step = (*step, *results)
        if not all(x.is_contiguous() for x in of_step) or any(x.storage_offset() for x in results):
            raise _Refused
        ranges = [(x.data_ptr(), x.data_ptr() + x.nbytes) for x in of_step]
        calls = (_Call * len(self._calls))()
        changes: list[int] = []
        for number, (name, arguments) in enumerate(self._calls):
            calls[number].function = _FUNCTIONS[name]
            for place, (kind, argument) in enumerate(zip(ARGUMENTS[name], arguments, strict=True)):
                calls[number].arguments[place] = _bits(kind, argument)
                if isinstance(argument, TableWidth):
                    changes += (number, place, len(ranges), argument - width)
                elif kind is ctypes.c_void_p and argument is not None:
                    for value, (begin, end) in enumerate(ranges):
                        if begin <= argument < end:
                            changes += (number, place, value, argument - begin)
        return _Recording(
            calls,
            len(calls),
            (ctypes.c_int64 * len(changes))(*changes),
            len(changes) // 4,
            tuple(result.shape for result in results),
            (*self._kept, *fixed, *map(_memory, fixed)),
        )


def _memory(value: object) -> object:
    """The memory of a tensor. Code that gives the tensor other memory must not free memory that the
    calls read."""
    is_plain = isinstance(value, Tensor) and not value.is_mkldnn
    return value.untyped_storage() if is_plain else None  # type: ignore[attr-defined]


def _bits(kind: type, argument: Any) -> int:
    if kind is ctypes.c_float:
        bits: int = struct.unpack("<i", struct.pack("<f", argument))[0]
        return bits
    return 0 if argument is None else int(argument)
