"""The body of ``/inference/v1/generate``: token ids in, token ids out."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from .fields import EngineFields


class GenerateRequest(EngineFields):
    token_ids: list[int] = Field(min_length=1)
    sampling_params: dict[str, Any] = Field(
        default_factory=dict, description="As of SamplingParams; max_tokens defaults to null."
    )
    output_mode: Literal["tokens", "text"] = Field("tokens", description="'text' gives both.")
    return_token_ids: bool | None = Field(None, description="Of the prompt.")
