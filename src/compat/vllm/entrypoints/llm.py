"""vLLM's module of ``LLM``."""

from pagespec.llm import LLM

__all__ = ["LLM"]
