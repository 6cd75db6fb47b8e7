"""vLLM's module of configurations."""

from pagespec.compat.configs import (
    AttentionConfig,
    CompilationConfig,
    KVTransferConfig,
    PoolerConfig,
    ProfilerConfig,
)

__all__ = [
    "AttentionConfig",
    "CompilationConfig",
    "KVTransferConfig",
    "PoolerConfig",
    "ProfilerConfig",
]
