"""vLLM's own tests and examples, run against pagespec: ``python -m tests.peer``."""
