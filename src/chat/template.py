"""Properties of one chat template, found by rendering small conversations.

A template is a program: it may read content as text or as a list of parts, and may ignore tools.
Its output shows these properties; its source does not.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any

Message = Mapping[str, Any]
# Texts that no template writes by itself; letters and digits only, which no filter changes.
_FIRST, _SECOND, _ARGUMENT = "Zq1wordone", "Zq2wordtwo", "Zq3argument"
PROBE_TOOL = "zq_probe_tool"
# Nine letters and digits, the only ids that templates of Mistral accept.
PROBE_ID = "zqcall001"
# Text of a template that prints a list of parts as a Python or JSON value.
_PRINTED = ("'type': 'text'", '"type": "text"')


def probe_tools() -> list[dict[str, Any]]:
    """One tool, with a text and a number for arguments."""
    properties = {
        "word": {"type": "string", "description": "A word."},
        "count": {"type": "integer", "description": "A number."},
    }
    parameters = {"type": "object", "properties": properties, "required": ["word"]}
    function = {"name": PROBE_TOOL, "description": "A tool.", "parameters": parameters}
    return [{"type": "function", "function": function}]


PROBE_ARGUMENTS = {"word": _ARGUMENT, "count": 3}


def probe_call(content: Any = "", call_id: str = PROBE_ID) -> Message:
    """An assistant's message with a call of the tool of :func:`probe_tools`."""
    function = {"name": PROBE_TOOL, "arguments": PROBE_ARGUMENTS}
    call = {"id": call_id, "type": "function", "function": function}
    return {"role": "assistant", "content": content, "tool_calls": [call]}


def probe_result(content: Any) -> Message:
    """The result of that call."""
    return {"role": "tool", "content": content, "tool_call_id": PROBE_ID, "name": PROBE_TOOL}


class ChatTemplate:
    """
    Args:
        source: the Jinja text.
        render: renders messages, tools (or None) and whether a generation prompt is added, with
            this template; raises whatever the template raises.
    """

    def __init__(
        self, source: str, render: Callable[[list[Message], Sequence[Any] | None, bool], str]
    ) -> None:
        self.source = source
        self._render = render
        self._fitting: dict[str, tuple[str, ...]] = {}

    def rendered(
        self,
        messages: list[Message],
        tools: Sequence[Any] | None = None,
        add_generation_prompt: bool = False,
    ) -> str | None:
        """The text; None if the template refuses the conversation."""
        try:
            return self._render(messages, tools, add_generation_prompt)
        except Exception:  # a template raises whatever Jinja or its own code raises
            return None

    # Content ------------------------------------------------------------------------------------

    def message(self, role: str, text: str = "Hello.") -> Message:
        """A message whose content the template reads."""
        return {"role": role, "content": self.fitting(role, text)}

    def fitting(self, role: str, content: str | list[dict[str, Any]] | None) -> Any:
        """The content in a form that the template reads for that role: text, a list of parts, or a
        list of one part for templates that read the first only. Line breaks join parts. The given
        form is kept if the template reads it. None: a message with tool calls alone.
        """
        if content is None:
            return self._no_content
        if role not in self._fitting:
            self._fitting[role] = self._readable_forms(role)
        readable = self._fitting[role]
        if isinstance(content, str):
            form, text = ("text" if "text" in readable or not content else "part"), content
        else:
            form = next((name for name in ("parts", "text", "part") if name in readable), "text")
            text = "\n".join(part["text"] for part in content)
            if form == "parts":
                return content
        if form == "part" and "part" in readable:
            return [{"type": "text", "text": text}]
        return text

    @cached_property
    def _no_content(self) -> str | None:
        """The form of missing content. Some templates write an empty message for empty text, others
        the word "None" for None."""
        user = self.message("user")
        empty, none = (self.rendered([user, probe_call(content)]) for content in ("", None))
        if empty is None or none is None or "None" in none:
            return "" if empty is not None or none is None else None
        return None if len(none) < len(empty) else ""

    def _readable_forms(self, role: str) -> tuple[str, ...]:
        words = {
            "text": f"{_FIRST}{_SECOND}",
            "parts": [{"type": "text", "text": _FIRST}, {"type": "text", "text": _SECOND}],
            "part": [{"type": "text", "text": f"{_FIRST}{_SECOND}"}],
        }
        return tuple(name for name, content in words.items() if self._reads(role, content))

    def _reads(self, role: str, content: Any) -> bool:
        # A user's message that is tried itself has no other user's content to fit.
        user: Message = {} if role == "user" else self.message("user")
        message: Message = {"role": role, "content": content}
        conversation: list[Message] = {
            "system": [message, user],
            "user": [message],
            "assistant": [user, message, user],
            "tool": [user, probe_call(), probe_result(content)],
        }.get(role, [user, message])
        text = self.rendered(conversation) or self.rendered(conversation, probe_tools()) or ""
        is_printed = any(printed in text for printed in _PRINTED)
        return _FIRST in text and _SECOND in text and not is_printed

    @cached_property
    def after_answer(self) -> str:
        """The text behind the assistant's content in a conversation of one turn; "" if the content
        is not found."""
        text = self.rendered([self.message("user"), self.message("assistant", _FIRST)])
        return text.rpartition(_FIRST)[2] if text is not None and _FIRST in text else ""

    # Tools --------------------------------------------------------------------------------------

    @cached_property
    def shows_tools(self) -> bool:
        """Whether the template shows tools to the model. True if that is unknown: the template then
        refuses conversations without tools, too."""
        user = [self.message("user")]
        for conversation in (user, [self.message("system", "Be kind."), *user]):
            text = self.rendered(conversation, probe_tools(), add_generation_prompt=True)
            if text is not None and PROBE_TOOL in text:
                return True
        return self.rendered(user, add_generation_prompt=True) is None


def turn_ends(
    template: ChatTemplate, tokenizer: Any, specials: Mapping[int, str]
) -> frozenset[int]:
    """The tokens that end an answer, beside the end tokens of the model's configs: the tokenizer's
    ``eos_token``, and the special token behind the assistant's content in a conversation of one
    turn, such as ``<|im_end|>``. Empty if there is neither.

    Args:
        specials: of the tokenizer, see :func:`.answer_text.special_tokens`.
    """
    own = getattr(tokenizer, "eos_token_id", None)
    found = {own} if type(own) is int else set()
    tail = template.after_answer.lstrip()
    ends = ((len(name), i) for i, name in specials.items() if tail.startswith(name))
    longest = max(ends, default=None)
    return frozenset(found if longest is None else found | {longest[1]})
