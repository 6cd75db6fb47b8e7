"""vLLM's ``benchmarks``."""
