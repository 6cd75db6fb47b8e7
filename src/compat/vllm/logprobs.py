"""vLLM's module of log-probabilities."""

from pagespec.engine.outputs import Logprob

__all__ = ["Logprob"]
