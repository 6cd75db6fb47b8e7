"""The bodies of ``/v1/completions``, and of ``/inference/v1/generate``: token ids in and out."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field

from .fields import EngineFields, GeneratingBody, Neutral
from .shapes import Integers, Object, Prompt


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
    neutral: ClassVar[Neutral] = {
        **GeneratingBody.neutral,
        "suffix": ("",),
        "prompt_embeds": ([],),
    }

    prompt: Prompt
    max_tokens: int | None = Field(
        16, description="null: the model's, else what the context leaves."
    )
    echo: bool | None = Field(None, description="The prompt precedes the answer.")
    logprobs: int | None = None
    add_special_tokens: bool | None = Field(None, description="To a prompt of text; default true.")
