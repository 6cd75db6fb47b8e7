"""vLLM's helpers."""

from pagespec.compat.helpers import random_uuid
from pagespec.compat.parser import FlexibleArgumentParser

__all__ = ["FlexibleArgumentParser", "random_uuid"]
