"""vLLM's helper of classes that edit logits."""

from pagespec.engine.logits_processors import process_dict_updates

__all__ = ["process_dict_updates"]
