"""vLLM's module of ``LLMEngine``."""

from pagespec.llm import LLMEngine

__all__ = ["LLMEngine"]
