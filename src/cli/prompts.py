"""Turns what a user wrote into a prompt: raw text, or a conversation in the chat template."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ..llm import LLM

Message = Mapping[str, Any]


def has_chat_template(llm: LLM) -> bool:
    return bool(getattr(llm.tokenizer, "chat_template", None))


def user_message(text: str) -> list[Message]:
    return [{"role": "user", "content": text}]


def conversation_prompt(llm: LLM, messages: Sequence[Message]) -> dict[str, list[int]]:
    """The conversation as token ids, ready for the assistant's answer.

    Raises:
        InvalidInputError: the model has no template, or the template refuses the messages.
    """
    return {"prompt_token_ids": llm.read_messages(messages).token_ids}
