"""vLLM's module of prompts."""

from pagespec.compat.prompts import PromptType, TextPrompt, TokensPrompt

__all__ = ["PromptType", "TextPrompt", "TokensPrompt"]
