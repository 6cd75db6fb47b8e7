"""Chat for one model: converts conversations to prompts, and makes the readers of answers."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field, replace
from functools import cached_property, partial
from typing import Any

from ..engine.inputs import PromptInput, PromptReader
from ..engine.sampling_params import SamplingParams
from ..engine.text.token_bytes import TokenBytes
from ..errors import InvalidInputError
from .answer_text import AnswerText, special_tokens
from .formats import AUTO, AnswerFormat
from .messages import names_of, read_messages, read_tools, with_short_ids
from .reasoning import ReasonedAnswer, reasoning_of
from .regions import FormatAnswer
from .response import Answer, AnswerContext, PlainAnswer, ResponseReader
from .response_template import TemplateAnswer, TemplateFormat, make_format
from .template import ChatTemplate, Message, detect, turn_ends
from .tool_choice import ForcedAnswer, ToolChoice, forced_name

# Arguments of ``apply_chat_template`` that are not template variables.
_NO_VARIABLES = frozenset(
    (
        *("conversation", "messages", "tools", "chat_template", "add_generation_prompt"),
        *("continue_final_message", "tokenize", "padding", "truncation", "max_length"),
        *("return_tensors", "return_dict", "return_assistant_tokens_mask", "tokenizer_kwargs"),
    )
)
_NO_TOOLS = "this model's chat template does not show tools to the model"
_NO_FORMAT = (
    "the format of this model's tool calls is unknown; set tool_call_format, or force a call with "
    "tool_choice"
)
# Maximum number of cached templates: requests may have their own.
_MAX_TEMPLATES = 64


@dataclass(frozen=True, slots=True)
class _Known:
    """Properties of one chat template, determined once.

    Attributes:
        form: the format of its answers; None if unknown.
        end_token_ids: see :func:`.template.turn_ends`.
    """

    template: ChatTemplate
    form: AnswerFormat | TemplateFormat | None
    end_token_ids: frozenset[int]


@dataclass(eq=False, repr=False)
class ChatReader:
    """Reads conversations and answers. Threads may share it.

    Attributes:
        prompts: the prompt reader with the same tokenizer.
        tokenizer: a transformers tokenizer; None: every conversation is refused.
        eos_token_ids: tokens that end an answer unless its parameters ignore them.
        tool_call_format, reasoning_format: names of :mod:`.formats`, or "auto" for detection.
    """

    prompts: PromptReader
    tokenizer: Any
    _: KW_ONLY
    eos_token_ids: frozenset[int] = frozenset()
    tool_call_format: str = AUTO
    reasoning_format: str = AUTO
    _templates: dict[str, _Known] = field(default_factory=dict, init=False)

    def read(
        self,
        messages: Any,
        *,
        tools: Any = None,
        tool_choice: ToolChoice = "auto",
        chat_template: str | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        stop_in_reasoning: bool = False,
        truncate: int | None = None,
        field: str = "messages",
    ) -> PromptInput:
        """Convert a conversation to a prompt.

        Args:
            messages: see :func:`.messages.read_messages`.
            tools: see :func:`.messages.read_tools`; the template shows them to the model. They are
                refused if it does not, or if the format of calls is unknown.
            tool_choice: see :mod:`.tool_choice`. A forced call has its own format.
            chat_template: a Jinja template that replaces the model's, or the name of one of the
                model's templates.
            add_generation_prompt: append the opening of an assistant message.
            continue_final_message: leave the last message open, for the model to continue.
            chat_template_kwargs: more template variables, such as ``{"enable_thinking": False}``.
            stop_in_reasoning: apply stop strings inside the reasoning too; by default they apply
                to the content only.
            truncate: see ``PromptReader.read``.
            field: name of the messages in errors.

        Raises:
            InvalidInputError: an argument is refused, here or by the template.
        """
        if self.tokenizer is None or not (chat_template or self.has_template):
            raise InvalidInputError(field, messages, self._no_template())
        if chat_template is not None and not isinstance(chat_template, str):
            raise InvalidInputError("chat_template", chat_template, "must be text")
        if continue_final_message and add_generation_prompt:
            limit = "must be False if add_generation_prompt is True"
            raise InvalidInputError("continue_final_message", continue_final_message, limit)
        if not isinstance(stop_in_reasoning, bool):
            raise InvalidInputError("stop_in_reasoning", stop_in_reasoning, "must be True or False")
        schemas = read_tools(tools)
        known = self._known(chat_template, schemas, field)
        template, form = known.template, known.form
        names = names_of(schemas)
        if schemas and not template.shows_tools:
            raise InvalidInputError("tools", names, _NO_TOOLS)
        reads_calls = form is not None and form.reads_calls
        if schemas and tool_choice == "auto" and not reads_calls and self.tool_call_format == AUTO:
            raise InvalidInputError("tools", names, _NO_FORMAT)
        conversation = read_messages(messages, field, template.fitting)
        calls = form.calls if isinstance(form, AnswerFormat) else None
        if calls is not None and calls.id_length is not None:
            conversation = with_short_ids(conversation, calls.id_length)
        arguments = {
            **_variables(chat_template_kwargs),
            "tools": schemas,
            "chat_template": template.source,
            "add_generation_prompt": bool(add_generation_prompt),
            "continue_final_message": bool(continue_final_message),
        }
        try:
            with self.prompts.guarded():
                text = self.tokenizer.apply_chat_template(conversation, tokenize=False, **arguments)
        except Exception as error:  # a template refuses with any exception that Jinja raises
            raise InvalidInputError(field, messages, f"chat template: {error}") from error
        # A template may show tools only in a system message, which may be missing. Names that are
        # not identifiers may be escaped there.
        if names and all(name.isidentifier() and name not in text for name in names):
            raise InvalidInputError("tools", names, _NO_TOOLS)
        prompt = self.prompts.read_rendered(text, field, truncate)
        reasoning = reasoning_of(
            form,
            text,
            is_disabled=(chat_template_kwargs or {}).get("enable_thinking") is False,
            stops_inside=stop_in_reasoning,
        )
        return replace(prompt, end_token_ids=known.end_token_ids, reasoning=reasoning)

    def reader(
        self,
        prompt: PromptInput,
        params: SamplingParams,
        *,
        tools: Any = None,
        tool_choice: ToolChoice = "auto",
        chat_template: str | None = None,
        request_id: str = "",
        index: int = 0,
    ) -> ResponseReader:
        """The reader of one answer.

        Args:
            prompt: the answer's prompt; its part of the answer is read first.
            params: the answer's stop strings and tokens, and whether special tokens are shown.
            tools: as in :meth:`read`: their schemas determine the types of arguments.
            tool_choice: see :mod:`.tool_choice`. If it forces a call, the parameters must have
                the ``structured_outputs`` that ``forced_output`` returns.
            chat_template: as in :meth:`read`.
            request_id, index: of the request and the answer; the ids of its tool calls are derived
                from them.

        Raises:
            InvalidInputError: tools or choice are refused.
        """
        stop_token_ids = frozenset(params.stop_token_ids or ())
        if not params.ignore_eos:
            stop_token_ids |= self.eos_token_ids | prompt.end_token_ids
        schemas = read_tools(tools)
        name = forced_name(schemas, tool_choice)
        is_forced = name is not None or tool_choice == "required"
        is_constrained = is_forced or params.structured_outputs is not None
        reasoning = prompt.reasoning
        if reasoning is not None and reasoning.stops_inside and not is_constrained:
            reasoning = None  # the beginning of the content does not matter
        text = AnswerText(
            self.tokenizer,
            prompt.token_ids,
            params,
            stop_token_ids,
            self._special_tokens,
            reasoning,
            self._token_bytes,
        )
        form = self._format(chat_template, schemas)
        content: Answer = ForcedAnswer(name, request_id, index) if is_forced else PlainAnswer()
        if form is None or (is_constrained and reasoning is None):
            return ResponseReader(text, content)
        context = AnswerContext(
            "" if is_constrained else self._text_of(prompt),
            schemas or (),
            tool_choice != "none" and not is_constrained,
            request_id,
            index,
        )
        answer: Answer
        if isinstance(form, TemplateFormat):
            answer = TemplateAnswer(form, context)
        else:
            answer = FormatAnswer(form, context)
        if is_constrained and reasoning is not None:
            answer = ReasonedAnswer(reasoning, answer, content)
        return ResponseReader(text, answer)

    def _no_template(self) -> str:
        if self.tokenizer is None:
            return "this model has no tokenizer, so there is no chat template"
        return "this model has no chat template; give chat_template=, or a plain prompt to generate"

    @property
    def has_template(self) -> bool:
        """Whether the tokenizer has its own chat template."""
        return bool(getattr(self.tokenizer, "chat_template", None))

    @property
    def answer_format(self) -> AnswerFormat | TemplateFormat | None:
        """The format of the model's reasoning and tool calls; None if unknown."""
        return self._format(None, None)

    def _format(
        self, chat_template: str | None, tools: Sequence[Any] | None
    ) -> AnswerFormat | TemplateFormat | None:
        if not chat_template and not self.has_template:
            return self._own_format
        try:
            return self._known(chat_template, tools, "messages").form
        except InvalidInputError:  # there is no template for this conversation
            return self._own_format

    @cached_property
    def _own_format(self) -> TemplateFormat | None:
        """The format of the tokenizer's response template, unless another format is configured."""
        own = getattr(self.tokenizer, "response_template", None)
        if own is None or (self.tool_call_format, self.reasoning_format) != (AUTO, AUTO):
            return None
        try:
            return make_format(dict(own))
        except (ImportError, ValueError, LookupError, TypeError, AttributeError) as error:
            warnings.warn(f"the tokenizer's response template is ignored: {error}", stacklevel=2)
            return None

    def _known(self, chat_template: str | None, tools: Sequence[Any] | None, field: str) -> _Known:
        """Properties of a conversation's template; each template is probed once."""
        find = getattr(self.tokenizer, "get_chat_template", None)  # resolves template names
        try:
            if find is not None:
                source = find(chat_template, tools)
            else:
                source = chat_template or self.tokenizer.chat_template
        except ValueError as error:
            raise InvalidInputError(field, chat_template, f"chat template: {error}") from error
        known = self._templates.get(source)
        if known is None:
            if len(self._templates) >= _MAX_TEMPLATES:
                self._templates.clear()
            template = ChatTemplate(source, partial(self._render, source))
            tokens = getattr(self.tokenizer, "added_tokens_encoder", {})
            form = self._own_format or detect(
                template, self.tool_call_format, self.reasoning_format, tokens
            )
            ends = turn_ends(template, self.tokenizer, self._special_tokens)
            known = self._templates[source] = _Known(template, form, ends)
        return known

    def _render(
        self,
        source: str,
        messages: list[Message],
        tools: Sequence[Any] | None,
        add_generation_prompt: bool,
    ) -> str:
        with self.prompts.guarded():
            text: str = self.tokenizer.apply_chat_template(
                messages,
                tokenize=False,
                tools=tools,
                chat_template=source,
                add_generation_prompt=add_generation_prompt,
            )
        return text

    @cached_property
    def _token_bytes(self) -> TokenBytes:
        return TokenBytes(self.tokenizer)

    @cached_property
    def _special_tokens(self) -> dict[int, str]:
        return special_tokens(self.tokenizer)

    def _text_of(self, prompt: PromptInput) -> str:
        if prompt.text is not None:
            return prompt.text
        text: str = self.tokenizer.decode(prompt.token_ids, skip_special_tokens=False)
        return text


def _variables(given: Any) -> dict[str, Any]:
    if given is None:
        return {}
    if not isinstance(given, Mapping) or not all(isinstance(name, str) for name in given):
        raise InvalidInputError("chat_template_kwargs", given, "must be a dict with names")
    for name in given:
        if name in _NO_VARIABLES:
            raise InvalidInputError(
                "chat_template_kwargs",
                name,
                "is not a template variable, or has its own argument",
            )
    return dict(given)
