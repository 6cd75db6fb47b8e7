"""vLLM's module of ``AsyncLLM``."""

from pagespec.serving.async_llm import AsyncLLM

__all__ = ["AsyncLLM"]
