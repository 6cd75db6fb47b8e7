"""vLLM's module of configurations."""

from pagespec.compat.configs import (
    AttentionConfig,
    CompilationConfig,
    KVTransferConfig,
    PoolerConfig,
    ProfilerConfig,
)
from pagespec.engine.structured_config import StructuredOutputsConfig

__all__ = [
    "AttentionConfig",
    "CompilationConfig",
    "KVTransferConfig",
    "PoolerConfig",
    "ProfilerConfig",
    "StructuredOutputsConfig",
]
