"""Checks fields that only the chat template uses: roles, reasoning effort."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

from ..errors import InvalidInputError

ROLES = ("system", "developer", "user", "assistant", "tool", "function")
EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")
# OpenAI's default, which has no effect.
_PLAIN_EFFORT = "medium"
_EFFORT = "reasoning_effort"


def check_roles(messages: Iterable[Mapping[str, Any]], tokenizer: Any) -> None:
    """Check the roles of messages; other roles are valid if the chat template contains them.

    Args:
        messages: as sent; only roles are checked.

    Raises:
        InvalidInputError: a role is unknown.
    """
    template = None
    for i, message in enumerate(messages):
        role = message.get("role")
        if not isinstance(role, str) or role in ROLES:
            continue
        template = _template(tokenizer) if template is None else template
        if not _names(template, role):
            limit = f"must be {', '.join(ROLES[:-1])} or {ROLES[-1]}, or named by the chat template"
            raise InvalidInputError(f"messages[{i}].role", role, limit)


def check_effort(effort: str | None, tokenizer: Any) -> None:
    """
    Raises:
        InvalidInputError: the effort is unknown, or the chat template does not use it.
    """
    if effort is None:
        return
    template = _template(tokenizer)
    is_read = re.search(rf"\b{_EFFORT}\b", template) is not None
    if effort not in EFFORTS and not (is_read and _names(template, effort)):
        raise InvalidInputError(_EFFORT, effort, f"must be one of {', '.join(EFFORTS)}")
    if not is_read and effort != _PLAIN_EFFORT:
        limit = "has no effect: the chat template of this model does not read it"
        if re.search(r"\benable_thinking\b", template):
            limit += "; see chat_template_kwargs.enable_thinking"
        raise InvalidInputError(_EFFORT, effort, limit)


def _template(tokenizer: Any) -> str:
    """The text of a model's chat template, or of all its templates."""
    given = getattr(tokenizer, "chat_template", None)
    texts = given.values() if isinstance(given, Mapping) else [given]
    return "\n".join(text for text in texts if isinstance(text, str))


def _names(template: str, value: str) -> bool:
    """Whether a template contains a value as a string literal."""
    return bool(value) and (f"'{value}'" in template or f'"{value}"' in template)
