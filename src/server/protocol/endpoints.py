"""The bodies of ``/v1/chat/completions``, ``/v1/completions`` and ``/inference/v1/generate``, and
the renaming of sampling parameters in errors to fields of a body.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, WrapValidator

from ...errors import InvalidInputError
from .fields import Body, EngineFields, GeneratingBody, Neutral
from .shapes import Handler, Integers, Object, Objects, Prompt, wrong

_GUIDED = ("json", "regex", "choice", "grammar")


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
        "truncation_side": ("left",),
        "return_assistant_tokens_mask": (False,),
        # A template is a program, which could occupy the server forever.
        "chat_template": (),
        "modalities": (["text"], []),
        "mm_processor_kwargs": ({},),
        "media_io_kwargs": ({},),
        "audio": (),
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
        None, description="null: the model's default, else the rest of the context."
    )
    logprobs: bool | None = None
    top_logprobs: int | None = None
    tools: Objects | None = None
    tool_choice: ToolChoiceField | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: str | None = Field(None, description="Passed to the chat template.")
    include_reasoning: bool | None = None
    stop_in_reasoning: bool | None = Field(
        None, description="Apply stop strings inside the reasoning too, not only to the content."
    )
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    echo: bool | None = Field(
        None, description="Prepend the last message to the answer if it is the assistant's."
    )
    chat_template_kwargs: Object | None = None
    documents: Objects | None = Field(None, description="Passed to the chat template.")
    return_prompt_text: bool | None = Field(None, description="Return the rendered prompt's text.")
    prediction: Object | None = Field(
        None,
        description="The expected answer, {'type': 'content', 'content': text}: a hint for draft "
        "tokens, which never changes the answer.",
    )


class GenerateRequest(EngineFields):
    neutral: ClassVar[Neutral] = {
        **EngineFields.neutral,
        "features": (),
        "assistant_tokens_mask": (),
        "token_offsets": (),
    }

    token_ids: Integers = Field(min_length=1)
    sampling_params: Object | None = Field(
        None, description="See SamplingParams; max_tokens: the model's default, else null."
    )
    output_mode: Literal["tokens", "text"] | None = Field(
        "tokens", description="'text' returns tokens and text."
    )
    return_token_ids: bool | None = Field(None, description="Return the prompt's token ids.")


class CompletionRequest(GeneratingBody):
    neutral: ClassVar[Neutral] = {**GeneratingBody.neutral, "suffix": ("",), "prompt_embeds": ([],)}

    prompt: Prompt
    max_tokens: int | None = Field(
        16, description="null: the model's default, else the rest of the context."
    )
    echo: bool | None = Field(None, description="Prepend the prompt to the answer.")
    logprobs: int | None = None
    add_special_tokens: bool | None = Field(None, description="For text prompts; default true.")
    truncation_side: Literal["left", "right"] | None = Field(
        None,
        description="The side from which truncate_prompt_tokens removes tokens; default: left.",
    )


class BodyError(InvalidInputError):
    """An error whose field names are already those of the body."""


@contextmanager
def client_names(body: EngineFields) -> Iterator[None]:
    """Rename fields in errors from sampling parameters to fields of the body."""
    try:
        yield
    except BodyError:
        raise
    except InvalidInputError as error:
        raise _renamed(error, _names(body)) from None


def guided(body: GeneratingBody) -> list[str]:
    """The kinds of the ``guided_*`` fields that a body has."""
    return [name for name in _GUIDED if getattr(body, f"guided_{name}") is not None]


def _names(body: EngineFields) -> dict[str, str]:
    """Field names of the body by names of the engine. A constraint's name also covers its parts."""
    names: dict[str, str] = {}
    if not isinstance(body, GeneratingBody):
        return names
    if isinstance(body, ChatRequest):
        if body.max_completion_tokens is not None:
            names["max_tokens"] = "max_completion_tokens"
        if body.top_logprobs is not None:
            names["logprobs"] = "top_logprobs"
    if body.structured_outputs:
        return names
    if found := guided(body):
        names["structured_outputs"] = f"guided_{found[0]}"
        names["structured_outputs.whitespace_pattern"] = "guided_whitespace_pattern"
    elif body.response_format is not None and body.response_format.type == "json_schema":
        names["structured_outputs"] = "response_format.json_schema.schema"
    elif body.response_format is not None and body.response_format.type != "text":
        names["structured_outputs"] = "response_format"
    elif isinstance(body, ChatRequest) and body.tools:
        # A tool choice that forces a call.
        names["structured_outputs"] = "tools"
    return names


def _renamed(error: InvalidInputError, names: Mapping[str, str]) -> InvalidInputError:
    head = error.field.partition(".")[0]
    name = names.get(error.field, names.get(head))
    if name is not None:
        return error.renamed(name)
    # "must be at most max_tokens = 3"
    limit = re.sub(r"\w+", lambda found: names.get(found[0], found[0]), error.limit)
    return error.renamed(error.field, limit)
