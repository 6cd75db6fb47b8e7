"""The usage of a request: tokens of its prompts and its answers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..aio.generation import Generation


def usage_of(
    generations: Sequence[Generation],
    *,
    num_output_tokens: int | None = None,
    num_reasoning_tokens: int | None = None,
) -> dict[str, Any]:
    """As far as the answers are now.

    Args:
        num_output_tokens: where it is not what the engine computed for all answers.
        num_reasoning_tokens: of them; None if the model's reasoning is not told apart.
    """
    num_prompt = sum(g.num_prompt_tokens for g in generations)
    if num_output_tokens is None:
        num_output_tokens = sum(g.num_output_tokens for g in generations)
    num_cached = sum(g.num_cached_tokens for g in generations)
    usage: dict[str, Any] = {
        "prompt_tokens": num_prompt,
        "completion_tokens": num_output_tokens,
        "total_tokens": num_prompt + num_output_tokens,
        "prompt_tokens_details": {"cached_tokens": num_cached},
    }
    if num_reasoning_tokens is not None:
        usage["completion_tokens_details"] = {"reasoning_tokens": num_reasoning_tokens}
    return usage
