"""CUDA graphs of steps, one a bucket of sizes, in one memory pool."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from tqdm import tqdm

from ..compile.step_inputs import MIN_SIZE

_FEW_ROWS = 8
_MAX_TOKENS_OF_FEW_ROWS = 2048
_MANY_ROWS = 256  # from here on a product takes longer for more tokens


@dataclass(frozen=True, slots=True, order=True)
class StepShape:
    """Sizes a step is padded to: those of a captured graph.

    Attributes:
        num_tokens, num_rows: of the step. A decode step has one token a row.
        is_decode: every row computes one token and samples.
    """

    num_tokens: int
    num_rows: int
    is_decode: bool


def default_buckets(max_num_seqs: int) -> tuple[int, ...]:
    """Batch sizes of decode steps to capture: powers of two and the sizes halfway from 64 on.

    Rows of padding cost next to nothing below 256 (a product reads its whole weight for any number
    of rows, attention reads nothing for them). Each graph costs memory and start-up time, most of
    it for loading the library's kernels for one more number of rows. One request runs in the
    bucket of 2, the smallest batch the captured graph is valid for.
    """
    sizes = [2, 4, 8, 16, 32, *(n * 2**k for k in range(5, 16) for n in (2, 3))]
    buckets = [size for size in sizes if size < max_num_seqs]
    return (*buckets, max(max_num_seqs, MIN_SIZE))


def mixed_shapes(max_num_tokens: int, max_num_rows: int) -> tuple[StepShape, ...]:
    """Shapes to capture for steps that are not pure decode: up to the token budget, for all rows,
    and for few of them where that matters to the time to a first token.

    Under a steady load of many requests, most steps are a token of every row and a prompt or two:
    sizes are close to one another there, since padding is computed like any token.
    """
    far = {64, 256, 512, *(1024 * 2**k for k in range(16)), 12288}
    near = {n * max_num_rows // 2 for n in (3, 4, 5, 6)} if max_num_rows >= _MANY_ROWS else set()
    near -= far
    sizes = sorted(size for size in far | near if size < max_num_tokens)
    shapes = []
    for size in [*sizes, max(max_num_tokens, MIN_SIZE)]:
        shapes.append(StepShape(size, max(max_num_rows, MIN_SIZE), False))
        if size in near or size > _MAX_TOKENS_OF_FEW_ROWS:
            continue
        if max_num_rows > _FEW_ROWS:
            shapes.append(StepShape(size, _FEW_ROWS, False))
    return tuple(shapes)


class _Memory:
    """Device memory of a tensor, for others to look at without keeping it allocated."""

    def __init__(self, tensor: Tensor) -> None:
        self.__cuda_array_interface__ = {
            "shape": (tensor.nbytes,),
            "typestr": "|u1",
            "data": (tensor.data_ptr(), False),
            "strides": None,
            "version": 3,
        }


def _alias(tensor: Tensor) -> Tensor:
    """A tensor over the same memory that does not own it; ``tensor`` must be contiguous."""
    raw = torch.as_tensor(_Memory(tensor), device=tensor.device)
    return raw.view(tensor.dtype).view(tensor.shape)


class StepGraphs:
    """Captures ``run(shape)`` for each shape, largest first: the smaller ones then reuse the
    memory of the largest.

    Args:
        run: queues one step of that shape and returns its logits, contiguous. It must read and
            write tensors at fixed addresses only, and wait for nothing.
    """

    def __init__(
        self,
        run: Callable[[StepShape], Tensor],
        shapes: Sequence[StepShape],
    ) -> None:
        self._decode = sorted(shape for shape in shapes if shape.is_decode)
        # Rows first: the fewest that do, then the fewest tokens.
        self._mixed = sorted(
            (shape for shape in shapes if not shape.is_decode),
            key=lambda shape: (shape.num_rows, shape.num_tokens),
        )
        self._graphs: dict[StepShape, tuple[torch.cuda.CUDAGraph, Tensor]] = {}
        pool = torch.cuda.graph_pool_handle()
        bar = tqdm(sorted(set(shapes), reverse=True), desc="capture CUDA graphs", disable=None)
        for shape in bar:
            # Kernels that are compiled or loaded at their first call must be there before.
            run(shape)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=pool):
                logits = run(shape)
            # Owned, the logits of every shape would stay allocated beside one another; the pool
            # lives as long as its graphs, so an alias is enough to read what a replay wrote.
            self._graphs[shape] = (graph, _alias(logits))
            del logits
        torch.cuda.synchronize()

    def __len__(self) -> int:
        return len(self._graphs)

    def shape_of(self, num_tokens: int, num_rows: int, is_decode: bool) -> StepShape | None:
        """The smallest captured shape that holds such a step, None if there is none."""
        for shape in self._decode if is_decode else ():
            if shape.num_rows >= num_rows:
                return shape
        for shape in self._mixed:
            if shape.num_rows >= num_rows and shape.num_tokens >= num_tokens:
                return shape
        return None

    def replay(self, shape: StepShape) -> Tensor:
        """Queue the step; its logits are overwritten by the next replay."""
        graph, logits = self._graphs[shape]
        graph.replay()
        return logits
