"""vLLM's module of its logger."""

from pagespec.compat.helpers import init_logger

__all__ = ["init_logger"]
