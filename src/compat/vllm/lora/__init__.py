"""vLLM's ``lora``."""
