"""vLLM's module of results."""

from pagespec.compat.refused import attribute
from pagespec.engine.outputs import CompletionOutput, RequestOutput

__all__ = ["CompletionOutput", "RequestOutput"]


def __getattr__(name: str) -> object:
    return attribute(__name__, name)
