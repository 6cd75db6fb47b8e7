"""The body of ``/v1/chat/completions``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, WrapValidator

from .fields import Body, GeneratingBody
from .shapes import Handler, Object, Objects, wrong


class NamedFunction(Body):
    name: str


class NamedToolChoice(Body):
    type: Literal["function"]
    function: NamedFunction


def _tool_choice(value: Any, _handler: Handler) -> Any:
    if isinstance(value, dict):
        return NamedToolChoice.model_validate(value)
    if value in ("none", "auto", "required"):
        return value
    raise wrong(
        "must be 'none', 'auto', 'required' or {'type': 'function', 'function': {'name': ...}}"
    )


ToolChoiceField = Annotated[
    Literal["none", "auto", "required"] | NamedToolChoice, WrapValidator(_tool_choice)
]


class ChatRequest(GeneratingBody):
    neutral: ClassVar[Mapping[str, Any]] = {
        **GeneratingBody.neutral,
        "add_special_tokens": False,
        # A template is a program: it could keep the server busy for ever.
        "chat_template": None,
        "echo": False,
        "documents": None,
        "modalities": None,
        "mm_processor_kwargs": None,
        "audio": None,
        "prediction": None,
        "verbosity": None,
        "web_search_options": None,
        "function_call": None,
        "functions": None,
    }

    messages: Objects
    max_completion_tokens: int | None = Field(
        None, description="None: the model's, else what the context leaves."
    )
    logprobs: bool | None = None
    top_logprobs: int | None = None
    tools: Objects | None = None
    tool_choice: ToolChoiceField | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: str | None = Field(None, description="Handed to the chat template.")
    include_reasoning: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: Object | None = None
