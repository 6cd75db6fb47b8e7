"""GPU memory profiling: runs the largest step to measure how much memory is left for KV blocks."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from ..engine.config import EngineConfig
from ..errors import InvalidInputError

_DEFAULT_SHARE = 0.9
# A captured graph keeps its launches on the device, a few hundred KB each. Allocations are also
# rounded up and fragment.
_BYTES_PER_GRAPH = 2 << 20
_SLACK_BYTES = 192 << 20
_SETTINGS = (
    "memory_utilization, num_blocks, max_num_batched_tokens, max_num_seqs or graph_batch_sizes"
)


@dataclass(frozen=True, slots=True)
class MemoryProfile:
    """GPU memory, in bytes, before KV blocks are allocated.

    Attributes:
        total: of the device. budget: for this process and all others on the device together.
        taken: in use before the profile, by this process (weights) and by others.
        weights: the model's part of ``taken``.
        activations: the most that a step allocates in addition, outside captured graphs. graphs:
            estimate for captured graphs.
    """

    total: int
    budget: int
    taken: int
    weights: int
    activations: int
    graphs: int

    @property
    def left_for_kv(self) -> int:
        """Bytes left of the budget."""
        return self.budget - self.taken - self.activations - self.graphs - _SLACK_BYTES

    @property
    def left_on_device(self) -> int:
        """Bytes left on the device. ``num_blocks``, if set, may exceed the budget."""
        return self.total - self.taken - self.activations - self.graphs


def profile_memory(
    config: EngineConfig,
    device: torch.device,
    run_worst_case: Callable[[], object],
    run_beside: Callable[[], object],
    num_graphs: int,
) -> MemoryProfile:
    """Measure the memory of ``run_worst_case``. Without graphs these are activations. With graphs
    they are a part of the graphs' pool, in which every step then runs. ``run_beside`` runs outside
    that pool.

    Raises:
        InvalidInputError: the step alone does not fit.
    """
    gc.collect()
    torch.cuda.empty_cache()
    num_free, num_total = torch.cuda.mem_get_info(device)
    before = torch.cuda.memory_allocated(device)
    with oom_as_input_error(config):
        # The first run loads and compiles kernels and creates the libraries' work spaces, which
        # stay. The second run shows the bytes that a step allocates and frees.
        run_worst_case()
        peak = _peak_of(run_worst_case, device)
        beside = _growth_of(run_beside, device) if num_graphs else 0
    torch.cuda.empty_cache()
    # Work spaces and loaded kernels.
    lasting = max(0, num_free - torch.cuda.mem_get_info(device)[0])
    return MemoryProfile(
        total=num_total,
        budget=int((config.memory_utilization or _DEFAULT_SHARE) * num_total),
        taken=num_total - num_free + lasting,
        weights=before,
        activations=beside if num_graphs else peak,
        graphs=peak + num_graphs * _BYTES_PER_GRAPH if num_graphs else 0,
    )


def _peak_of(run: Callable[[], object], device: torch.device) -> int:
    """The most bytes that a run allocates. A graph's pool cannot use free memory between other
    allocations, so memory that the run found there counts. Memory that the run left there belongs
    to ``taken``."""
    before = torch.cuda.memory_allocated(device)
    grown = _growth_of(run, device)
    return max(grown, torch.cuda.max_memory_allocated(device) - before)


def _growth_of(run: Callable[[], object], device: torch.device) -> int:
    """Bytes by which a run increases the reserved memory."""
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_reserved(device)
    run()
    return max(0, torch.cuda.max_memory_reserved(device) - before)


@contextmanager
def oom_as_input_error(config: EngineConfig) -> Iterator[None]:
    """Convert an out-of-memory error of the device to an error that names the settings to change.

    Raises:
        InvalidInputError: replaces ``torch.OutOfMemoryError``.
    """
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise InvalidInputError(
            "memory_utilization",
            config.memory_utilization or _DEFAULT_SHARE,
            f"the GPU ran out of memory ({str(error).split('. ')[0]}); lower one of {_SETTINGS}",
        ) from error
