"""The body of ``/inference/v1/generate``: token ids in, token ids out."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field

from .fields import EngineFields, Neutral
from .shapes import Integers, Object


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
