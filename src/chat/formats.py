"""How models write reasoning and tool calls, as data: one row per format, read by :mod:`.regions`.

Names of tool formats are those of vLLM's parsers where the formats are the same.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property

from ..errors import InvalidInputError
from .call_syntax import GemmaCalls, JsonCalls, NamedJson, PythonCalls, Syntax, TaggedCalls

AUTO, NONE = "auto", "none"


@dataclass(frozen=True)
class ReasoningFormat:
    """
    Attributes:
        open, close: what delimits reasoning.
        contents: pairs of what delimits content, where that has delimiters of its own.
        skipped: text that is neither reasoning nor content.
        is_open: an answer begins with reasoning, also without its opening delimiter.
        anywhere: reasoning may follow content; if not, ``open`` is text there.
        before_content: what ends reasoning and begins content, where ``close`` does not.
        header_end: as of :class:`..engine.delimiter.Delimiter`, of all of these.
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
        open, close: what delimits calls; without ``close`` they end where nothing more is a call.
        syntaxes: tried in this order.
        at_start: calls begin the content, and are read only if tools were given: ``open`` is what
            other content may begin with.
        header_end: as of :class:`..engine.delimiter.Delimiter`, of ``open``.
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
        markers: what begins calls.
        skipped: text around calls that is no content.
        tokens: further texts that calls are written with.
        in_reasoning: a call may end reasoning that is not closed.
        id_length: letters and digits of a call's id, where the template accepts no other ids.
    """

    markers: tuple[Marker, ...]
    skipped: tuple[str, ...] = ()
    tokens: tuple[str, ...] = ()
    in_reasoning: bool = False
    id_length: int | None = None

    @cached_property
    def texts(self) -> frozenset[str]:
        """What stands in the text of calls beside names and arguments."""
        ends = (text for marker in self.markers for text in (marker.open, marker.close))
        return frozenset((*ends, *self.skipped, *self.tokens))


@dataclass(frozen=True)
class AnswerFormat:
    """How one model writes its answers.

    Attributes:
        anchors: texts of which the last in a prompt is right before the answer.
    """

    reasoning: ReasoningFormat | None = None
    calls: CallFormat | None = None
    anchors: tuple[str, ...] = ()

    @property
    def reads_calls(self) -> bool:
        return self.calls is not None

    @property
    def begins_open(self) -> bool:
        """Whether an answer begins with reasoning also without its opening delimiter."""
        return self.reasoning is not None and self.reasoning.is_open

    @property
    def reasoning_tags(self) -> tuple[str, str] | None:
        """The texts that open and end reasoning, as ``("<think>", "</think>")``."""
        form = self.reasoning
        return None if form is None else (form.open, form.before_content or form.close)

    @property
    def header_end(self) -> str:
        """What ends ``reasoning_tags`` that may name a content type; empty: none may."""
        return "" if self.reasoning is None else self.reasoning.header_end

    def prefix_of(self, prompt: str) -> str:
        """The part of a prompt that belongs to the answer already, such as an opened ``<think>``;
        none if the prompt has no beginning of an answer that is known."""
        ends = [place + len(a) for a in self.anchors if (place := prompt.rfind(a)) >= 0]
        return prompt[max(ends) :] if ends else ""

    def delimiters(self) -> Iterator[str]:
        """All texts that may delimit something."""
        if self.reasoning is not None:
            yield from (self.reasoning.open, self.reasoning.close, *self.reasoning.skipped)
            for pair in self.reasoning.contents:
                yield from pair
        if self.calls is not None:
            yield from self.calls.texts


_THINK = ReasoningFormat("<think>", "</think>")
# The channels of OpenAI's harmony; a call's recipient stands before its channel or behind it, and a
# content type, such as `<|constrain|>json`, at the end of the header.
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

# The first whose delimiters a chat template has is taken.
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


def _tags(begin: str, opened: str) -> TaggedCalls:
    """Functions that invoke tags open, with the name as an attribute."""
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


_DSML = _tags("｜DSML｜", "｜DSML｜")

# Detection tries them in this order: of formats with equal delimiters the stricter comes first.
CALL_FORMATS: dict[str, CallFormat] = {
    "hermes": CallFormat((Marker("<tool_call>", "</tool_call>", (_JSON,)),)),
    "qwen3_coder": CallFormat((Marker("<tool_call>", "</tool_call>", (_function_tags("\n"),)),)),
    "glm45": CallFormat(
        (
            Marker(
                "<tool_call>",
                "</tool_call>",
                (
                    TaggedCalls(
                        name=r"\s*(?P<name>[\w.:/-]+)(?=\s*<arg_key>|\s*</tool_call>)",
                        key=r"\s*<arg_key>(?P<key>[^<\n]+)</arg_key>\s*<arg_value>",
                        value_close="</arg_value>",
                    ),
                ),
            ),
        ),
    ),
    "deepseek": CallFormat(
        (
            Marker(
                "<｜tool▁call▁begin｜>",
                "<｜tool▁call▁end｜>",
                (
                    NamedJson(r"function<｜tool▁sep｜>(?P<name>[^\n<]+)\n```json\n", "```"),
                    NamedJson(r"(?P<name>[^\n<]+)<｜tool▁sep｜>"),
                ),
            ),
        ),
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
    "mistral": CallFormat(
        (
            Marker(
                "[TOOL_CALLS]",
                "",
                (
                    _JSON,
                    NamedJson(
                        r"\s*(?P<name>[^\s\[\]{}]+)(?:\[CALL_ID\](?P<id>\w+))?(?:\[ARGS\]|(?=\{))"
                    ),
                ),
            ),
        ),
        tokens=("[CALL_ID]", "[ARGS]"),
        id_length=9,
    ),
    "harmony": CallFormat(
        tuple(
            Marker(
                f"{begin} to=functions.",
                "<|call|>",
                (
                    NamedJson(
                        r"(?P<name>[\w.-]+)(?:<\|channel\|>(?:commentary|analysis))?"
                        r"\s*(?:<\|constrain\|>)?\s*[\w.+/-]*\s*<\|message\|>"
                    ),
                ),
                header_end=" to=functions." if begin else "",
            )
            for begin in ("<|channel|>commentary", "<|channel|>analysis", "")
        ),
        tokens=("<|channel|>", "<|constrain|>", "<|message|>"),
    ),
    "kimi_k2": CallFormat(
        (
            Marker(
                "<|tool_call_begin|>",
                "<|tool_call_end|>",
                (
                    NamedJson(
                        r"\s*(?P<id>(?:functions\.)?(?P<name>[\w.-]+?)(?::\d+)?)\s*"
                        r"<\|tool_call_argument_begin\|>"
                    ),
                ),
            ),
        ),
        skipped=("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"),
        tokens=("<|tool_call_argument_begin|>",),
        in_reasoning=True,
    ),
    "minimax_m2": CallFormat(
        (Marker("<minimax:tool_call>", "</minimax:tool_call>", (_tags("", ""),)),)
    ),
    "minimax": CallFormat((Marker("<tool_calls>", "</tool_calls>", (_JSON,)),)),
    "gemma4": CallFormat(
        (Marker("<|tool_call>", "<tool_call|>", (GemmaCalls('<|"|>'),)),),
        tokens=('<|"|>',),
        in_reasoning=True,
    ),
    "seed_oss": CallFormat(
        (Marker("<seed:tool_call>", "</seed:tool_call>", (_function_tags(""),)),)
    ),
    "cohere": CallFormat(
        (
            Marker(
                "<|START_ACTION|>",
                "<|END_ACTION|>",
                (JsonCalls(names=("tool_name",), arguments=("parameters",)),),
            ),
        ),
    ),
    "nemotron": CallFormat((Marker("<TOOLCALL>", "</TOOLCALL>", (_JSON,)),)),
    "functionary": CallFormat(
        (Marker("<function=", "</function>", (NamedJson(r"(?P<name>[^>\n]+)>"),)),)
    ),
    "phi4_mini_json": CallFormat((Marker("<|tool_call|>", "<|/tool_call|>", (_JSON,)),)),
    "granite": CallFormat((Marker("<|tool_call|>", "", (_JSON,)),)),
    "lfm2": CallFormat((Marker("<|tool_call_start|>", "<|tool_call_end|>", (PythonCalls(),)),)),
    "llama3_json": CallFormat(
        (Marker("<|python_tag|>", "", (_JSON,)), Marker("{", "", (_BARE_JSON,), at_start=True))
    ),
    "pythonic": CallFormat(
        (
            Marker("<|python_start|>", "<|python_end|>", (PythonCalls(),)),
            Marker("[", "", (PythonCalls(prefix="["),), at_start=True),
        ),
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
