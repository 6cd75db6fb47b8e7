"""vLLM's module of its parser."""

from pagespec.compat.parser import FlexibleArgumentParser

__all__ = ["FlexibleArgumentParser"]
