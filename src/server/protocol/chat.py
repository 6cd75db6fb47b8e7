"""The body of ``/v1/chat/completions``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Literal

from pydantic import Field

from .fields import Body, GeneratingBody


class NamedFunction(Body):
    name: str


class NamedToolChoice(Body):
    type: Literal["function"]
    function: NamedFunction


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

    messages: list[dict[str, Any]]
    max_completion_tokens: int | None = Field(None, description="None: what the context leaves.")
    logprobs: bool | None = None
    top_logprobs: int | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedToolChoice | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: str | None = Field(None, description="Handed to the chat template.")
    include_reasoning: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
