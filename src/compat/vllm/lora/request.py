"""vLLM's module of requests with an adapter, which are refused."""

from pagespec.compat.refused import LoRARequest

__all__ = ["LoRARequest"]
