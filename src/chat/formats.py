"""Formats of reasoning and tool calls, as data: one row per format, read by :mod:`.regions`.

A tool format has the name of vLLM's parser if the format is the same.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from ..errors import InvalidInputError
from .call_syntax import GemmaCalls, JsonCalls, NamedJson, PythonCalls, Syntax, TaggedCalls

AUTO, NONE = "auto", "none"


@dataclass(frozen=True)
class ReasoningFormat:
    """
    Attributes:
        open, close: delimiters of reasoning.
        contents: pairs of delimiters of content, if content has delimiters.
        skipped: text that is neither reasoning nor content.
        is_open: an answer begins with reasoning even without its opening delimiter.
        anywhere: reasoning may follow content; if not, ``open`` is plain text there.
        before_content: the delimiter between reasoning and content, if not ``close``.
        header_end: see :class:`..engine.text.delimiter.Delimiter`; for all of these.
    """

    open: str
    close: str
    contents: tuple[tuple[str, str], ...] = ()
    skipped: tuple[str, ...] = ()
    is_open: bool = False
    anywhere: bool = False
    before_content: str = ""
    header_end: str = ""


@dataclass(frozen=True)
class Marker:
    """
    Attributes:
        open, close: delimiters of calls; without ``close``, calls end at the first other text.
        syntaxes: tried in this order.
        at_start: calls are at the start of the content, and are read only if there are tools,
            because other content may begin with ``open``.
        header_end: see :class:`..engine.text.delimiter.Delimiter`; for ``open``.
    """

    open: str
    close: str
    syntaxes: tuple[Syntax, ...]
    at_start: bool = False
    header_end: str = ""


@dataclass(frozen=True)
class CallFormat:
    """
    Attributes:
        markers: the delimiters of calls.
        skipped: text around calls that does not belong to the content.
        tokens: other fixed texts in calls.
        in_reasoning: a call may end reasoning that is not closed.
        id_length: number of letters and digits of a call's id, if the template requires a length.
    """

    markers: tuple[Marker, ...]
    skipped: tuple[str, ...] = ()
    tokens: tuple[str, ...] = ()
    in_reasoning: bool = False
    id_length: int | None = None

    @cached_property
    def texts(self) -> frozenset[str]:
        """The texts in calls besides names and arguments."""
        ends = (text for marker in self.markers for text in (marker.open, marker.close))
        return frozenset((*ends, *self.skipped, *self.tokens))


@dataclass(frozen=True)
class AnswerFormat:
    """The format of one model's answers.

    Attributes:
        anchors: texts; the last occurrence of any of them in a prompt precedes the answer.
    """

    reasoning: ReasoningFormat | None = None
    calls: CallFormat | None = None
    anchors: tuple[str, ...] = ()

    @property
    def reads_calls(self) -> bool:
        return self.calls is not None

    @property
    def begins_open(self) -> bool:
        """Whether an answer begins with reasoning even without its opening delimiter."""
        return self.reasoning is not None and self.reasoning.is_open

    @property
    def reasoning_tags(self) -> tuple[str, str] | None:
        """The texts that open and close reasoning, as ``("<think>", "</think>")``."""
        form = self.reasoning
        return None if form is None else (form.open, form.before_content or form.close)

    @property
    def header_end(self) -> str:
        """The part of ``reasoning_tags`` that follows a content type; empty without such types."""
        return "" if self.reasoning is None else self.reasoning.header_end

    def prefix_of(self, prompt: str) -> str:
        """The part of a prompt that belongs to the answer, such as an opened ``<think>``; "" if the
        prompt contains no known beginning of an answer."""
        ends = [place + len(a) for a in self.anchors if (place := prompt.rfind(a)) >= 0]
        return prompt[max(ends) :] if ends else ""

    def delimiters(self) -> Iterator[str]:
        """All delimiters."""
        if self.reasoning is not None:
            yield from (self.reasoning.open, self.reasoning.close, *self.reasoning.skipped)
            for pair in self.reasoning.contents:
                yield from pair
        if self.calls is not None:
            yield from self.calls.texts


_THINK = ReasoningFormat("<think>", "</think>")
# The channels of OpenAI's harmony. A call's recipient precedes or follows its channel. A content
# type, such as `<|constrain|>json`, is at the end of the header.
_HARMONY = ReasoningFormat(
    "<|channel|>analysis<|message|>",
    "<|end|>",
    contents=(
        ("<|channel|>final<|message|>", "<|end|>"),
        ("<|channel|>commentary<|message|>", "<|end|>"),
    ),
    skipped=("<|start|>assistant", "<|end|>", "<|return|>", "<|call|>"),
    anywhere=True,
    before_content="<|channel|>final<|message|>",
    header_end="<|message|>",
)

# Detection takes the first format whose delimiters are in the chat template.
REASONING_FORMATS: dict[str, ReasoningFormat] = {
    "harmony": _HARMONY,
    "gemma4": ReasoningFormat("<|channel>thought\n", "<channel|>", anywhere=True),
    "mistral": ReasoningFormat("[THINK]", "[/THINK]", anywhere=True),
    "seed_oss": ReasoningFormat("<seed:think>", "</seed:think>"),
    "cohere": ReasoningFormat(
        "<|START_THINKING|>",
        "<|END_THINKING|>",
        skipped=("<|START_RESPONSE|>", "<|END_RESPONSE|>", "<|START_TEXT|>", "<|END_TEXT|>"),
    ),
    "think": _THINK,
    "deepseek_r1": replace(_THINK, is_open=True),
}

_JSON = JsonCalls()
_BARE_JSON = JsonCalls(prefix="{")
_HARMONY_CALL = NamedJson(
    r"(?P<name>[\w.-]+)(?:<\|channel\|>(?:commentary|analysis))?"
    r"\s*(?:<\|constrain\|>)?\s*[\w.+/-]*\s*<\|message\|>"
)


def _tags(begin: str, opened: str) -> TaggedCalls:
    """Functions opened by invoke tags, with the name as an attribute."""
    return TaggedCalls(
        name=rf'\s*<{opened}invoke name="(?P<name>[^"\n]+)">',
        key=rf'\s*<{opened}parameter name="(?P<key>[^"\n]+)"'
        rf'(?: string="(?P<text>true|false)")?>',
        value_close=f"</{begin}parameter>",
        close=f"</{begin}invoke>",
        repeats=True,
    )


def _function_tags(pad: str) -> TaggedCalls:
    return TaggedCalls(
        name=r"\s*<function=(?P<name>[^>\n]+)>",
        key=r"\s*<parameter=(?P<key>[^>\n]+)>",
        value_close="</parameter>",
        close="</function>",
        pad=pad,
    )


def _calls(open: str, close: str, *syntaxes: Syntax, **rest: Any) -> CallFormat:
    """A format with one marker."""
    return CallFormat((Marker(open, close, syntaxes),), **rest)


_DSML = _tags("｜DSML｜", "｜DSML｜")

# Detection tries the formats in this order: with equal delimiters the stricter format comes first.
CALL_FORMATS: dict[str, CallFormat] = {
    "hermes": _calls("<tool_call>", "</tool_call>", _JSON),
    "qwen3_coder": _calls("<tool_call>", "</tool_call>", _function_tags("\n")),
    "glm45": _calls(
        "<tool_call>",
        "</tool_call>",
        TaggedCalls(
            name=r"\s*(?P<name>[\w.:/-]+)(?=\s*<arg_key>|\s*</tool_call>)",
            key=r"\s*<arg_key>(?P<key>[^<\n]+)</arg_key>\s*<arg_value>",
            value_close="</arg_value>",
        ),
    ),
    "deepseek": _calls(
        "<｜tool▁call▁begin｜>",
        "<｜tool▁call▁end｜>",
        NamedJson(r"function<｜tool▁sep｜>(?P<name>[^\n<]+)\n```json\n", "```"),
        NamedJson(r"(?P<name>[^\n<]+)<｜tool▁sep｜>"),
        skipped=("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"),
        tokens=("<｜tool▁sep｜>",),
        in_reasoning=True,
    ),
    "deepseek_v32": CallFormat(
        (
            Marker("<｜DSML｜function_calls>", "</｜DSML｜function_calls>", (_DSML,)),
            Marker("<｜DSML｜tool_calls>", "</｜DSML｜tool_calls>", (_DSML,)),
        ),
        tokens=("｜DSML｜",),
    ),
    "mistral": _calls(
        "[TOOL_CALLS]",
        "",
        _JSON,
        NamedJson(r"\s*(?P<name>[^\s\[\]{}]+)(?:\[CALL_ID\](?P<id>\w+))?(?:\[ARGS\]|(?=\{))"),
        tokens=("[CALL_ID]", "[ARGS]"),
        id_length=9,
    ),
    "harmony": CallFormat(
        tuple(
            Marker(
                f"{begin} to=functions.",
                "<|call|>",
                (_HARMONY_CALL,),
                header_end=" to=functions." if begin else "",
            )
            for begin in ("<|channel|>commentary", "<|channel|>analysis", "")
        ),
        tokens=("<|channel|>", "<|constrain|>", "<|message|>"),
    ),
    "kimi_k2": _calls(
        "<|tool_call_begin|>",
        "<|tool_call_end|>",
        NamedJson(
            r"\s*(?P<id>(?:functions\.)?(?P<name>[\w.-]+?)(?::\d+)?)\s*<\|tool_call_argument_begin\|>"
        ),
        skipped=("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"),
        tokens=("<|tool_call_argument_begin|>",),
        in_reasoning=True,
    ),
    "minimax_m2": _calls("<minimax:tool_call>", "</minimax:tool_call>", _tags("", "")),
    "minimax": _calls("<tool_calls>", "</tool_calls>", _JSON),
    "gemma4": _calls(
        "<|tool_call>", "<tool_call|>", GemmaCalls('<|"|>'), tokens=('<|"|>',), in_reasoning=True
    ),
    "seed_oss": _calls("<seed:tool_call>", "</seed:tool_call>", _function_tags("")),
    "cohere": _calls(
        "<|START_ACTION|>",
        "<|END_ACTION|>",
        JsonCalls(names=("tool_name",), arguments=("parameters",)),
    ),
    "nemotron": _calls("<TOOLCALL>", "</TOOLCALL>", _JSON),
    "functionary": _calls("<function=", "</function>", NamedJson(r"(?P<name>[^>\n]+)>")),
    "phi4_mini_json": _calls("<|tool_call|>", "<|/tool_call|>", _JSON),
    "granite": _calls("<|tool_call|>", "", _JSON),
    "lfm2": _calls("<|tool_call_start|>", "<|tool_call_end|>", PythonCalls()),
    "llama3_json": CallFormat(
        (Marker("<|python_tag|>", "", (_JSON,)), Marker("{", "", (_BARE_JSON,), at_start=True))
    ),
    "pythonic": CallFormat(
        (
            Marker("<|python_start|>", "<|python_end|>", (PythonCalls(),)),
            Marker("[", "", (PythonCalls(prefix="["),), at_start=True),
        )
    ),
}


def check_formats(tool_call_format: object, reasoning_format: object) -> None:
    """
    Raises:
        InvalidInputError: there is no format of that name.
    """
    for field, name, known in (
        ("tool_call_format", tool_call_format, CALL_FORMATS),
        ("reasoning_format", reasoning_format, REASONING_FORMATS),
    ):
        names = (AUTO, NONE, *known)
        if not isinstance(name, str) or name not in names:
            raise InvalidInputError(field, name, f"must be one of {', '.join(names)}")
