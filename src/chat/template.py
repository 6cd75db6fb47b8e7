"""Determines a chat template's properties and answer format by rendering small conversations.

A template is a program: it may read content as text or as a list of parts, and may ignore tools.
These properties show in its output, not in its source. To detect the format, a conversation with a
tool call is rendered, and each format parses the text of the call: the first one that succeeds is
the model's. If a template writes no calls but instructs the model how to, its source contains the
format's opening delimiter.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any

from .answer_text import Kind, Piece
from .deltas import ToolCallDelta
from .formats import (
    AUTO,
    CALL_FORMATS,
    NONE,
    REASONING_FORMATS,
    AnswerFormat,
    CallFormat,
    ReasoningFormat,
)
from .regions import FormatAnswer
from .response import AnswerContext

Message = Mapping[str, Any]
# Texts that no template contains; letters and digits only, which no filter changes.
_FIRST, _SECOND, _ARGUMENT, _WORD = "Zq1wordone", "Zq2wordtwo", "Zq3argument", "Zq4word"
_PROBE_TOOL = "zq_probe_tool"
# Nine letters and digits, the only ids that Mistral's templates accept.
_PROBE_ID = "zqcall001"
# Ids of calls that templates accept, and from which formats with the name in the id can be read.
_IDS = (_PROBE_ID, f"functions.{_PROBE_TOOL}:0")
# Substrings of a rendered list of parts that is printed as a Python or JSON value.
_PRINTED = ("'type': 'text'", '"type": "text"')


def _probe_tools() -> list[dict[str, Any]]:
    """One tool, with a text and a number as arguments."""
    properties = {
        "word": {"type": "string", "description": "A word."},
        "count": {"type": "integer", "description": "A number."},
    }
    parameters = {"type": "object", "properties": properties, "required": ["word"]}
    function = {"name": _PROBE_TOOL, "description": "A tool.", "parameters": parameters}
    return [{"type": "function", "function": function}]


_PROBE_ARGUMENTS = {"word": _ARGUMENT, "count": 3}


def _probe_call(content: Any = "", call_id: str = _PROBE_ID) -> Message:
    """An assistant message with a call of the tool of :func:`_probe_tools`."""
    function = {"name": _PROBE_TOOL, "arguments": _PROBE_ARGUMENTS}
    call = {"id": call_id, "type": "function", "function": function}
    return {"role": "assistant", "content": content, "tool_calls": [call]}


def _probe_result(content: Any) -> Message:
    """The result of that call."""
    return {"role": "tool", "content": content, "tool_call_id": _PROBE_ID, "name": _PROBE_TOOL}


class ChatTemplate:
    """
    Args:
        source: the Jinja text.
        render: renders messages, tools (or None) and whether to add a generation prompt, with
            this template; raises any exception of the template.
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
        """The rendered text; None if the template refuses the conversation."""
        try:
            return self._render(messages, tools, add_generation_prompt)
        except Exception:  # Jinja, or the template itself, may raise anything
            return None

    # Content ------------------------------------------------------------------------------------

    def message(self, role: str, text: str = "Hello.") -> Message:
        """A message with content in a form that the template reads."""
        return {"role": role, "content": self.fitting(role, text)}

    def fitting(self, role: str, content: str | list[dict[str, Any]] | None) -> Any:
        """The content in a form that the template reads for that role: text, a list of parts, or a
        list of one part for templates that read only the first. Parts are joined by line breaks.
        The given form is kept if the template reads it. None: a message with tool calls only.
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
        write the word "None" for None."""
        user = self.message("user")
        empty, none = (self.rendered([user, _probe_call(content)]) for content in ("", None))
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
        # If the probed message is a user's itself, no other user message needs to be added.
        user: Message = {} if role == "user" else self.message("user")
        message: Message = {"role": role, "content": content}
        conversation: list[Message] = {
            "system": [message, user],
            "user": [message],
            "assistant": [user, message, user],
            "tool": [user, _probe_call(), _probe_result(content)],
        }.get(role, [user, message])
        text = self.rendered(conversation) or self.rendered(conversation, _probe_tools()) or ""
        is_printed = any(printed in text for printed in _PRINTED)
        return _FIRST in text and _SECOND in text and not is_printed

    @cached_property
    def after_answer(self) -> str:
        """The text after the assistant's content in a conversation of one turn; "" if the content
        is not found."""
        text = self.rendered([self.message("user"), self.message("assistant", _FIRST)])
        return text.rpartition(_FIRST)[2] if text is not None and _FIRST in text else ""

    # Tools --------------------------------------------------------------------------------------

    @cached_property
    def shows_tools(self) -> bool:
        """Whether the template shows tools to the model. True if unknown, which means that the
        template refuses conversations without tools, too."""
        user = [self.message("user")]
        for conversation in (user, [self.message("system", "Be kind."), *user]):
            text = self.rendered(conversation, _probe_tools(), add_generation_prompt=True)
            if text is not None and _PROBE_TOOL in text:
                return True
        return self.rendered(user, add_generation_prompt=True) is None


def turn_ends(
    template: ChatTemplate, tokenizer: Any, specials: Mapping[int, str]
) -> frozenset[int]:
    """The tokens that end an answer, in addition to the end tokens of the model's configs: the
    tokenizer's ``eos_token``, and the special token after the assistant's content in a conversation
    of one turn, such as ``<|im_end|>``. Empty if there is neither.

    Args:
        specials: the tokenizer's special tokens, see :func:`.answer_text.special_tokens`.
    """
    own = getattr(tokenizer, "eos_token_id", None)
    found = {own} if type(own) is int else set()
    tail = template.after_answer.lstrip()
    ends = ((len(name), i) for i, name in specials.items() if tail.startswith(name))
    longest = max(ends, default=None)
    return frozenset(found if longest is None else found | {longest[1]})


# Detection of the format ------------------------------------------------------------------------


def detect(
    template: ChatTemplate,
    tool_call_format: str = AUTO,
    reasoning_format: str = AUTO,
    tokens: Container[str] = (),
) -> AnswerFormat | None:
    """The format of the answers to a template's prompts; None if unknown.

    Args:
        tool_call_format, reasoning_format: names of :mod:`.formats`, or "auto" for detection.
        tokens: the tokenizer's added tokens.
    """
    if reasoning_format == AUTO:
        reasoning = _reasoning(template, tokens)
    else:
        reasoning = REASONING_FORMATS.get(reasoning_format)
    if tool_call_format == AUTO:
        calls = _calls(template, tokens)
    else:
        calls = None if tool_call_format == NONE else CALL_FORMATS[tool_call_format]
    if reasoning is None and calls is None:
        return None
    return AnswerFormat(reasoning, calls, tuple(_anchors(template, reasoning)))


def _reasoning(template: ChatTemplate, tokens: Container[str]) -> ReasoningFormat | None:
    texts = [
        template.source,
        template.rendered([template.message("user", _WORD)], None, True) or "",
    ]
    for form in REASONING_FORMATS.values():
        if any(form.open in text for text in texts) and any(form.close in text for text in texts):
            return form
    # The first templates of DeepSeek-R1 only remove reasoning: those models begin with it.
    first = REASONING_FORMATS["deepseek_r1"]
    if first.close in template.source and "<｜Assistant｜>" in template.source:
        return first
    # A model may reason even if its template does not mention it.
    return next(
        (f for f in REASONING_FORMATS.values() if f.open in tokens and f.close in tokens), None
    )


def _calls(template: ChatTemplate, tokens: Container[str]) -> CallFormat | None:
    written = list(_written_calls(template))
    for form in CALL_FORMATS.values():
        if any(_reads(form, text) for text in written):
            return form
    if written:
        return None
    for form in CALL_FORMATS.values():
        marker = form.markers[0]
        if all(
            text in template.source or text in tokens
            for text in (marker.open, marker.close)
            if text
        ):
            return form
    return None


def _reads(form: CallFormat, text: str) -> bool:
    """Whether the format reads a text as the probe's call."""
    answer = FormatAnswer(AnswerFormat(calls=form), AnswerContext(tools=_probe_tools()))
    deltas = [*answer.push(Piece(text, Kind.TEXT)), *answer.finish()]
    calls = [(d.name, json.loads(d.arguments)) for d in deltas if isinstance(d, ToolCallDelta)]
    return calls == [(_PROBE_TOOL, _PROBE_ARGUMENTS)]


def _written_calls(template: ChatTemplate) -> Iterator[str]:
    """Renderings of an assistant's message with one call."""
    user, tools = template.message("user", _WORD), _probe_tools()
    opened = template.rendered([user], tools, True)
    closed = template.rendered([user], tools)
    if opened is None or closed is None:
        opened = closed = ""
    answered = [user, template.message("assistant", _WORD)]
    end = (template.rendered(answered, tools) or "").rpartition(_WORD)[2]
    for call_id in _IDS:
        for content in ("", None, template.fitting("assistant", "Hm.")):
            text = template.rendered([user, _probe_call(content, call_id)], tools)
            if text is None or _PROBE_TOOL not in text.replace(opened, "", 1):
                continue
            text = text.removesuffix(end)
            if text.startswith(opened):
                yield text[len(opened) :]
            elif text.startswith(closed):
                begin, prompt = text[len(closed) :], opened[len(closed) :]
                yield begin
                yield begin[_num_common(begin, prompt) :]
            else:
                yield text


def _num_common(a: str, b: str) -> int:
    """The length of the common prefix of two texts."""
    pairs = enumerate(zip(a, b, strict=False))
    return next((i for i, (x, y) in pairs if x != y), min(len(a), len(b)))


def _anchors(template: ChatTemplate, reasoning: ReasoningFormat | None) -> Iterator[str]:
    """Texts between a message and its answer, without reasoning."""
    result = _probe_result(template.fitting("tool", _WORD))
    called = [template.message("user"), _probe_call(), result]
    cuts: list[str] = []
    if reasoning is not None:  # with content delimiters, `close` also ends other messages
        cuts = [reasoning.open] if reasoning.contents else [reasoning.open, reasoning.close]
    cut = "|".join(map(re.escape, cuts)) or "(?!)"
    for conversation in ([template.message("user", _WORD)], called):
        text = template.rendered(conversation, None, True)
        if text is None:
            text = template.rendered(conversation, _probe_tools(), True) or ""
        if _WORD in text:
            anchor = re.split(cut, text.rpartition(_WORD)[2])[0]
            if anchor.strip():
                yield anchor
