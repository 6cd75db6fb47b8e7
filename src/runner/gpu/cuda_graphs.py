"""CUDA graphs of steps: the shapes that steps are padded to, and one graph per shape, in one
memory pool."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor
from tqdm import tqdm

from ...compile.step_inputs import MIN_SIZE, StepOutputs
from ..layout import StepShape

_Key = TypeVar("_Key")
_FEW_ROWS = 8
_MAX_TOKENS_OF_FEW_ROWS = 2048
_MANY_ROWS = 256  # from here on a matmul's time grows with the number of tokens


def default_buckets(max_num_seqs: int) -> tuple[int, ...]:
    """Batch sizes of decode steps to capture: powers of two and the sizes halfway from 64 on.

    Padding rows cost almost nothing below 256: a matmul reads its whole weight for any number of
    rows, attention reads nothing for padding, and padding goes to no expert. Each graph costs
    memory and startup time, mostly for loading the library's kernels for one more number of rows. A
    single request runs in the bucket of 2, the smallest batch size for which the captured graph is
    valid.
    """
    sizes = [2, 4, 8, 16, 32, *(n * 2**k for k in range(5, 16) for n in (2, 3))]
    buckets = [size for size in sizes if size < max_num_seqs]
    return (*buckets, max(max_num_seqs, MIN_SIZE))


def mixed_shapes(max_num_tokens: int, max_num_rows: int) -> tuple[StepShape, ...]:
    """Shapes to capture for steps that are not pure decode: up to the token budget, for all rows;
    and for few rows where that affects the time to first token.

    Under a steady load of many requests, most steps have one token of every row and one or two
    prompts. Sizes are close together there, because padding is computed like any token.
    """
    far = {64, 256, 512, *(1024 * 2**k for k in range(16)), 12288}
    near = {n * max_num_rows // 2 for n in (3, 4, 5, 6)} if max_num_rows >= _MANY_ROWS else set()
    near -= far
    sizes = sorted(size for size in far | near if size < max_num_tokens)
    shapes = []
    for size in [*sizes, max(max_num_tokens, MIN_SIZE)]:
        shapes.append(StepShape.mixed(size, max(max_num_rows, MIN_SIZE)))
        if size in near or size > _MAX_TOKENS_OF_FEW_ROWS:
            continue
        if max_num_rows > _FEW_ROWS:
            shapes.append(StepShape.mixed(size, _FEW_ROWS))
    return tuple(shapes)


class _Memory:
    """Device memory of a tensor, which other code can read without keeping it allocated."""

    def __init__(self, tensor: Tensor) -> None:
        self.__cuda_array_interface__ = {
            "shape": (tensor.nbytes,),
            "typestr": "|u1",
            "data": (tensor.data_ptr(), False),
            "strides": None,
            "version": 3,
        }


def _alias(tensor: Tensor) -> Tensor:
    """A non-owning view: a tensor over the same memory; ``tensor`` must be contiguous."""
    raw = torch.as_tensor(_Memory(tensor), device=tensor.device)
    return raw.view(tensor.dtype).view(tensor.shape)


class StepGraphs:
    """Captures ``run(shape)`` for each shape, largest first, so that smaller graphs reuse the
    memory of the largest.

    Args:
        run: queues one step of that shape and returns its results, contiguous. It must access
            tensors only at fixed addresses, and must not wait.

    Attributes:
        pool: the memory of the graphs.
    """

    def __init__(
        self,
        run: Callable[[StepShape], StepOutputs],
        shapes: Sequence[StepShape],
    ) -> None:
        self._decode = sorted(shape for shape in shapes if shape.is_decode)
        # Fewest sufficient rows first, then fewest tokens.
        self._mixed = sorted(
            (shape for shape in shapes if not shape.is_decode),
            key=lambda shape: (shape.num_rows, shape.num_tokens),
        )
        self._run = run
        self._graphs: dict[StepShape, tuple[torch.cuda.CUDAGraph, StepOutputs]] = {}
        self.pool: Any = torch.cuda.graph_pool_handle()
        bar = tqdm(sorted(set(shapes), reverse=True), desc="capture CUDA graphs", disable=None)
        for shape in bar:
            # Kernels that are compiled or loaded at their first call must exist before the capture.
            run(shape)
            self._capture(shape)
        torch.cuda.synchronize()

    def _capture(self, shape: StepShape) -> None:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self.pool):
            results = self._run(shape)
        # If owned, the results of all shapes would stay allocated at the same time. The pool lives
        # as long as its graphs, so a non-owning view suffices to read the results of a replay.
        logits, hidden, _ = results
        aliases = StepOutputs(_alias(logits), None if hidden is None else _alias(hidden))
        self._graphs[shape] = (graph, aliases)

    def __len__(self) -> int:
        return len(self._graphs)

    def shape_of(self, num_tokens: int, num_rows: int, is_decode: bool) -> StepShape | None:
        """The smallest captured shape that fits such a step, or None."""
        for shape in self._decode if is_decode else ():
            if shape.num_rows >= num_rows:
                return shape
        for shape in self._mixed:
            if shape.num_rows >= num_rows and shape.num_tokens >= num_tokens:
                return shape
        return None

    def replay(self, shape: StepShape) -> StepOutputs:
        """Queue the step. The next replay overwrites its results.

        A shape that is not captured is captured first, in the memory of the others. All kernels of
        such a shape have run before: one with hidden states has those of a "long" one.
        """
        if shape not in self._graphs:
            self._capture(shape)
        graph, results = self._graphs[shape]
        graph.replay()
        return results


def capture_calls(
    calls: Mapping[_Key, Callable[[], None]], pool: Any
) -> dict[_Key, torch.cuda.CUDAGraph]:
    """A graph of each call, in order. The calls return nothing: their results are at addresses
    outside of the pool, which they share with other graphs."""
    graphs: dict[_Key, torch.cuda.CUDAGraph] = {}
    for key, run in tqdm(calls.items(), desc="capture CUDA graphs of drafting", disable=None):
        run()
        graphs[key] = graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=pool):
            run()
    torch.cuda.synchronize()
    return graphs
