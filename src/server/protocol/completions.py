"""The body of ``/v1/completions``."""

from __future__ import annotations

from typing import ClassVar

from pydantic import Field

from .fields import GeneratingBody, Neutral
from .shapes import Prompt


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
