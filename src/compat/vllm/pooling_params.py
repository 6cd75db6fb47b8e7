"""vLLM's module of pooling parameters, which are refused."""

from pagespec.compat.refused import attribute

__all__ = []


def __getattr__(name: str) -> object:
    return attribute(__name__, name)
