"""Types of the prompts of ``generate``; a prompt is a text, a list of token ids, or such a dict."""

from __future__ import annotations

from typing import Any, TypedDict


class _Marks(TypedDict, total=False):
    cache_salt: str
    priority: int
    owner: str
    prediction: str | list[int]


class _Text(TypedDict):
    prompt: str


class _Tokens(TypedDict):
    prompt_token_ids: list[int]


class TextPrompt(_Text, _Marks):
    """A prompt as text; see ``LLM.generate`` for the other keys."""


class TokensPrompt(_Tokens, _Marks, total=False):
    """A prompt as token ids; ``prompt`` is its text, which is only kept for the result."""

    prompt: str


PromptType = str | list[int] | TextPrompt | TokensPrompt | dict[str, Any]
