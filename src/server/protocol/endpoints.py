"""The bodies of ``/v1/chat/completions``, ``/v1/completions`` and ``/inference/v1/generate``."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, WrapValidator

from .fields import Body, EngineFields, GeneratingBody, Neutral
from .shapes import Handler, Integers, Object, Objects, Prompt, wrong


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
    neutral: ClassVar[Neutral] = {
        **GeneratingBody.neutral,
        "add_special_tokens": (False,),
        # A template is a program: it could keep the server busy for ever.
        "chat_template": (),
        "echo": (False,),
        "documents": ([],),
        "modalities": (["text"], []),
        "mm_processor_kwargs": ({},),
        "media_io_kwargs": ({},),
        "audio": (),
        "prediction": (),
        "verbosity": ("medium",),  # OpenAI's default
        "web_search_options": (),
        "function_call": ("none",),
        "functions": ([],),
        "thinking": (),
        "context_management": ([],),
        "include_server_side_tool_invocations": (False,),
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
    reasoning_effort: str | None = Field(None, description="For the chat template.")
    include_reasoning: bool | None = None
    stop_in_reasoning: bool | None = Field(
        None, description="Stop strings count in the reasoning, too; else from the content on."
    )
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: Object | None = None


class GenerateRequest(EngineFields):
    neutral: ClassVar[Neutral] = {**EngineFields.neutral, "features": ()}

    token_ids: Integers = Field(min_length=1)
    sampling_params: Object | None = Field(
        None, description="As of SamplingParams; max_tokens: the model's, else null."
    )
    output_mode: Literal["tokens", "text"] | None = Field(
        "tokens", description="'text' gives both."
    )
    return_token_ids: bool | None = Field(None, description="Of the prompt.")


class CompletionRequest(GeneratingBody):
    neutral: ClassVar[Neutral] = {**GeneratingBody.neutral, "suffix": ("",), "prompt_embeds": ([],)}

    prompt: Prompt
    max_tokens: int | None = Field(
        16, description="null: the model's, else what the context leaves."
    )
    echo: bool | None = Field(None, description="The prompt precedes the answer.")
    logprobs: int | None = None
    add_special_tokens: bool | None = Field(None, description="To a prompt of text; default true.")
