"""Configurations of vLLM that ``LLM`` takes as objects."""

from __future__ import annotations

from typing import Any


class Settings(dict[str, Any]):
    """The keyword arguments of a configuration, as a dict. ``LLM`` accepts or refuses it by the
    name of its own argument; an empty one is accepted."""

    def __init__(self, **given: Any) -> None:
        super().__init__(given)

    def __getattr__(self, name: str) -> Any:
        """A given argument. Raises AttributeError if it was not given."""
        if name not in self:
            raise AttributeError(f"{type(self).__name__!r} was not given {name!r}")
        return self[name]


class AttentionConfig(Settings):
    """The argument ``attention_config``."""


class CompilationConfig(Settings):
    """The argument ``compilation_config``."""


class KVTransferConfig(Settings):
    """The argument ``kv_transfer_config``."""


class PoolerConfig(Settings):
    """The argument ``pooler_config``."""


class ProfilerConfig(Settings):
    """The argument ``profiler_config``."""
