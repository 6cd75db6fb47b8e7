"""vLLM's older module of ``AsyncLLM``."""

from pagespec.serving.async_llm import AsyncLLM as AsyncLLMEngine

__all__ = ["AsyncLLMEngine"]
