"""vLLM's ``engine``; the modules are also in ``pagespec.engine``."""
