"""vLLM's older module of tokenizers."""

from pagespec.compat.helpers import get_tokenizer

__all__ = ["get_tokenizer"]
