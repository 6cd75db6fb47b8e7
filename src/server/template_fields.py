"""Fields that only the chat template uses: roles, reasoning effort, documents."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from ..errors import InvalidInputError

ROLES = ("system", "developer", "user", "assistant", "tool", "function")
EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")
# OpenAI's default, which has no effect.
_PLAIN_EFFORT = "medium"
_EFFORT, _SWITCH = "reasoning_effort", "enable_thinking"
_UNREAD = "has no effect: the chat template of this model does not read it"


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
    is_read = _reads(template, _EFFORT)
    if effort not in EFFORTS and not (is_read and _names(template, effort)):
        raise InvalidInputError(_EFFORT, effort, f"must be one of {', '.join(EFFORTS)}")
    if not (is_read or effort == _PLAIN_EFFORT or _reads(template, _SWITCH)):
        raise InvalidInputError(_EFFORT, effort, _UNREAD)


def template_variables(
    given: Mapping[str, Any] | None,
    effort: str | None,
    documents: Sequence[Mapping[str, Any]] | None,
    tokenizer: Any,
) -> dict[str, Any]:
    """The variables of a chat template: ``chat_template_kwargs``, the effort and documents. As in
    vLLM, the effort also switches a template's ``enable_thinking``: off for "none", else on.

    Raises:
        InvalidInputError: the chat template does not read the documents.
    """
    found = dict(given or {})
    template = _template(tokenizer)
    if effort is not None:
        found.setdefault(_EFFORT, effort)
        if _reads(template, _SWITCH):
            found.setdefault(_SWITCH, effort != "none")
    if documents:
        if not _reads(template, "documents"):
            raise InvalidInputError("documents", f"{len(documents)} documents", _UNREAD)
        found.setdefault("documents", documents)
    return found


def _reads(template: str, name: str) -> bool:
    return re.search(rf"\b{name}\b", template) is not None


def _template(tokenizer: Any) -> str:
    """The text of a model's chat template, or of all its templates."""
    given = getattr(tokenizer, "chat_template", None)
    texts = given.values() if isinstance(given, Mapping) else [given]
    return "\n".join(text for text in texts if isinstance(text, str))


def _names(template: str, value: str) -> bool:
    """Whether a template contains a value as a string literal."""
    return bool(value) and (f"'{value}'" in template or f'"{value}"' in template)
