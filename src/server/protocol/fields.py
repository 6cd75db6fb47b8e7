"""What the bodies of all generating endpoints may have."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator


class Body(BaseModel):
    """A JSON object whose fields are all known, with no value taken for one of another type."""

    model_config = ConfigDict(extra="forbid", strict=True)


class StreamOptions(Body):
    include_usage: bool | None = Field(None, description="A last chunk has the usage.")
    continuous_usage_stats: bool | None = Field(None, description="Every chunk has the usage.")


class JsonSchema(Body):
    name: str | None = None
    description: str | None = None
    schema_: dict[str, Any] | None = Field(None, alias="schema")
    strict: bool | None = Field(None, description="Schemas are always kept, also without it.")


class ResponseFormat(Body):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None


class Identification(Body):
    """Fields that clients send along and that change nothing here."""

    user: str | None = None
    metadata: dict[str, Any] | None = None
    store: Literal[False] | None = None
    service_tier: Literal["auto", "default"] | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None


class EngineFields(Body):
    """How the engine treats a request."""

    model: str | None = Field(None, description="None: the model that is served.")
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    priority: int = Field(0, description="0 is the most urgent. Needs the policy 'priority'.")
    cache_salt: str | None = Field(None, description="Only requests with it share cached prefixes.")
    request_id: str | None = Field(None, description="Part of the answer's id.")


class GeneratingBody(Identification, EngineFields):
    """What ``/v1/completions`` and ``/v1/chat/completions`` share. None stands for the default."""

    # Fields known from other servers, with the values that ask for nothing; null is always one.
    neutral: ClassVar[Mapping[str, Any]] = {
        "length_penalty": 1.0,
        "use_beam_search": False,
        "early_stopping": False,
        "logits_processors": None,
        "guided_decoding_backend": None,
        "kv_transfer_params": None,
        "vllm_xargs": None,
    }

    n: int | None = None
    best_of: int | None = None
    max_tokens: int | None = None
    min_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    allowed_token_ids: list[int] | None = None
    bad_words: list[str] | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    spaces_between_special_tokens: bool | None = None
    truncate_prompt_tokens: int | None = None
    prompt_logprobs: int | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: dict[str, Any] | None = None
    guided_json: str | dict[str, Any] | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    guided_whitespace_pattern: str | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None

    @model_validator(mode="before")
    @classmethod
    def _without_neutral_fields(cls, body: Any) -> Any:
        if not isinstance(body, dict):
            return body
        return {key: value for key, value in body.items() if not cls._asks_for_nothing(key, value)}

    @classmethod
    def _asks_for_nothing(cls, key: str, value: Any) -> bool:
        if key not in cls.neutral:
            return False
        # 0 and False are equal to Python.
        neutral = cls.neutral[key]
        return value is None or (value == neutral and isinstance(value, bool) == (neutral is False))
