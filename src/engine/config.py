"""Settings of an engine: checked before a model is loaded."""

from __future__ import annotations

from dataclasses import dataclass, replace

from pagespec.engine.policy import Policy
from pagespec.errors import InvalidInputError

COMPILE_MODES = ("auto", "graph", "inductor", "eager")
ATTENTION_KERNELS = ("auto", "triton", "flash", "reference")
LOAD_FORMATS = ("auto", "dummy")
DTYPES = ("auto", "float32", "bfloat16", "float16")
MAX_BLOCK_SIZE = 4096
_CPU_BUDGET, _GPU_BUDGET = 2048, 8192  # tokens a step


def _check_count(name: str, value: object, low: int = 1, high: int | None = None) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < low:
        raise InvalidInputError(name, value, f"must be an integer of {low} or more")
    if high is not None and value > high:
        raise InvalidInputError(name, value, f"must be at most {high}")


def _check_choice(name: str, value: object, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise InvalidInputError(name, value, f"must be one of {', '.join(choices)}")


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """The keyword arguments of ``LLM``, validated. See there for their meaning."""

    dtype: str = "auto"
    device: str = "auto"
    max_model_len: int | None = None
    max_num_seqs: int = 64
    max_num_batched_tokens: int | None = None
    block_size: int = 16
    num_blocks: int | None = None
    memory_utilization: float | None = None
    enable_prefix_caching: bool = True
    compile: str = "auto"
    attention: str = "auto"
    transparent: bool = True
    overlap: bool | None = None
    graph_batch_sizes: tuple[int, ...] | None = None
    policy: str = "fcfs"
    seed: int = 0
    load_format: str = "auto"

    def __post_init__(self) -> None:
        _check_choice("dtype", self.dtype, DTYPES)
        _check_choice("compile", self.compile, COMPILE_MODES)
        _check_choice("attention", self.attention, ATTENTION_KERNELS)
        _check_choice("load_format", self.load_format, LOAD_FORMATS)
        if not isinstance(self.device, str) or not self.device:
            raise InvalidInputError("device", self.device, 'must be "auto", "cpu" or "cuda[:N]"')
        if self.max_model_len is not None:
            _check_count("max_model_len", self.max_model_len, 2)
        _check_count("max_num_seqs", self.max_num_seqs)
        _check_count("block_size", self.block_size, 1, MAX_BLOCK_SIZE)
        if self.num_blocks is not None:
            _check_count("num_blocks", self.num_blocks)
            if self.memory_utilization is not None:
                raise InvalidInputError(
                    "memory_utilization", self.memory_utilization, "give it or num_blocks, not both"
                )
        if self.max_num_batched_tokens is not None:
            _check_count("max_num_batched_tokens", self.max_num_batched_tokens)
            if self.max_num_batched_tokens < self.max_num_seqs:
                raise InvalidInputError(
                    "max_num_batched_tokens",
                    self.max_num_batched_tokens,
                    f"must be at least max_num_seqs = {self.max_num_seqs}, "
                    "so that every running request can decode one token a step",
                )
        share = self.memory_utilization
        if share is not None and (not isinstance(share, (int, float)) or not 0.0 < share <= 1.0):
            raise InvalidInputError("memory_utilization", share, "must be above 0 and at most 1")
        for name in ("enable_prefix_caching", "transparent"):
            if not isinstance(getattr(self, name), bool):
                raise InvalidInputError(name, getattr(self, name), "must be True or False")
        if self.overlap is not None and not isinstance(self.overlap, bool):
            raise InvalidInputError("overlap", self.overlap, "must be True, False or None")
        if self.graph_batch_sizes is not None:
            if not isinstance(self.graph_batch_sizes, tuple):
                raise InvalidInputError(
                    "graph_batch_sizes", self.graph_batch_sizes, "must be a tuple of integers"
                )
            for size in self.graph_batch_sizes:
                _check_count("graph_batch_sizes", size, 1, self.max_num_seqs)
        bound = 1 << 63
        if (
            isinstance(self.seed, bool)
            or not isinstance(self.seed, int)
            or not -bound <= self.seed < bound
        ):
            raise InvalidInputError("seed", self.seed, "must be a 64-bit integer")
        Policy(self.policy)

    @property
    def num_tokens_a_step(self) -> int:
        """The token budget: as given, or 2,048 (more if ``max_num_seqs`` is more)."""
        return self.max_num_batched_tokens or max(_CPU_BUDGET, self.max_num_seqs)

    def for_gpu(self) -> EngineConfig:
        """The same with the defaults of a GPU: it takes more tokens to keep one busy."""
        budget = self.max_num_batched_tokens or max(_GPU_BUDGET, self.max_num_seqs)
        return replace(self, max_num_batched_tokens=budget)
