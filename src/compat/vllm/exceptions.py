"""vLLM's module of errors about requests."""

from pagespec.errors import InvalidInputError as VLLMValidationError

__all__ = ["VLLMValidationError"]
