"""vLLM's ``transformers_utils``."""
