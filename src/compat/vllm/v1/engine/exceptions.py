"""vLLM's module of errors of an engine."""

from pagespec.errors import EngineError as EngineDeadError
from pagespec.errors import EngineError as EngineGenerateError

__all__ = ["EngineDeadError", "EngineGenerateError"]
