"""The tokens that end an answer of a conversation, beside the end tokens of the model's configs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .template import ChatTemplate


def turn_ends(
    template: ChatTemplate, tokenizer: Any, specials: Mapping[int, str]
) -> frozenset[int]:
    """The tokenizer's ``eos_token``, and the special token that follows the assistant's content in
    a conversation of one turn, such as ``<|im_end|>``; empty if there is neither.

    Args:
        specials: of the tokenizer, see :func:`.answer_text.special_tokens`.
    """
    own = getattr(tokenizer, "eos_token_id", None)
    found = {own} if type(own) is int else set()
    tail = template.after_answer.lstrip()
    ends = ((len(name), i) for i, name in specials.items() if tail.startswith(name))
    longest = max(ends, default=None)
    return frozenset(found if longest is None else found | {longest[1]})
