"""vLLM's ``v1.sample``."""
