"""vLLM's ``entrypoints``."""
