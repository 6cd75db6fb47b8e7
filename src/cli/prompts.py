"""Turns what a user wrote into a prompt: raw text, or a conversation in the chat template."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ..engine.inputs import PromptInput
    from ..llm import LLM

Message = Mapping[str, Any]


def has_chat_template(llm: LLM) -> bool:
    return bool(getattr(llm.tokenizer, "chat_template", None))


def user_message(text: str) -> list[Message]:
    return [{"role": "user", "content": text}]


def conversation_prompt(llm: LLM, messages: Sequence[Message], **options: Any) -> PromptInput:
    """The conversation as ``LLM.chat`` reads it: its answer ends with the template's end of turn,
    and stop strings and constraints count from where its content begins.

    Args:
        options: of a prompt: ``cache_salt``, ``priority``, ``owner``.

    Raises:
        InvalidInputError: the model has no template, the template refuses the messages, or an
            option is refused.
    """
    return llm.reader.marked(llm.read_messages(messages), **options)
