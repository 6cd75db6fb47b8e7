"""vLLM's module of configurations."""

from pagespec.compat.configs import (
    AttentionConfig,
    CompilationConfig,
    KVTransferConfig,
    PoolerConfig,
    ProfilerConfig,
)
from pagespec.engine.structured_config import StructuredOutputsConfig
from pagespec.llm_engine import VllmConfig

__all__ = [
    "AttentionConfig",
    "CompilationConfig",
    "KVTransferConfig",
    "PoolerConfig",
    "ProfilerConfig",
    "StructuredOutputsConfig",
    "VllmConfig",
]
