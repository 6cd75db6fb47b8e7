"""vLLM's module that prints embeddings, which are refused."""

from pagespec.compat.refused import attribute


def __getattr__(name: str) -> object:
    return attribute(__name__, name)
