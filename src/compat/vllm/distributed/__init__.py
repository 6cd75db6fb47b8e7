"""vLLM's names for several processes; ``pagespec.distributed`` has them too."""

from pagespec.distributed.cleanup import cleanup_dist_env_and_memory

__all__ = ["cleanup_dist_env_and_memory"]
