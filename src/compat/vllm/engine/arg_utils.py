"""vLLM's module of engine arguments."""

from pagespec.compat.arguments import AsyncEngineArgs, EngineArgs

__all__ = ["AsyncEngineArgs", "EngineArgs"]
