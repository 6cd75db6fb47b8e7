"""What the bodies of all generating endpoints may have."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Literal, get_args, get_type_hints

from pydantic import BaseModel, ConfigDict, Field, create_model, model_validator

from ...engine.sampling_params import SamplingParams
from ...params.declare import declared
from .shapes import Biases, Integers, Object, TextOrObject, TextOrTexts, Texts

MAX_REQUEST_ID = 256
# Each is reported, at a price; an error names as many.
_MAX_UNKNOWN = 3


# Fields that are known and not supported, with the values that ask for nothing. Null is always one.
Neutral = Mapping[str, Sequence[Any]]


class Body(BaseModel):
    """A JSON object whose fields are all known, with no value taken for one of another type."""

    model_config = ConfigDict(extra="forbid", strict=True)

    neutral: ClassVar[Neutral] = {}

    @model_validator(mode="before")
    @classmethod
    def _with_few_unknown_fields(cls, body: Any) -> Any:
        """Without neutral fields, and without the unknown ones behind the first few: these are
        enough for it to be refused."""
        if not isinstance(body, dict):
            return body
        known = {field.alias or name for name, field in cls.model_fields.items()}
        kept: dict[Any, Any] = {}
        num_unknown = 0
        for key, value in body.items():
            if key in known:
                kept[key] = value
            elif num_unknown < _MAX_UNKNOWN and not cls._asks_for_nothing(key, value):
                kept[key] = value
                num_unknown += 1
        return kept

    @classmethod
    def _asks_for_nothing(cls, key: str, value: Any) -> bool:
        if key not in cls.neutral:
            return False
        # 0 and False are equal to Python.
        return value is None or any(
            value == one and isinstance(value, bool) == isinstance(one, bool)
            for one in cls.neutral[key]
        )


class StreamOptions(Body):
    neutral: ClassVar[Neutral] = {"include_obfuscation": (False,)}

    include_usage: bool | None = Field(None, description="A last chunk has the usage.")
    continuous_usage_stats: bool | None = Field(None, description="Every chunk has the usage.")

    @property
    def asks_for_anything(self) -> bool:
        return bool(self.include_usage or self.continuous_usage_stats)


class JsonSchema(Body):
    name: str | None = None
    description: str | None = None
    schema_: Object | None = Field(None, alias="schema")
    strict: bool | None = Field(None, description="Schemas are always kept, also without it.")


class ResponseFormat(Body):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None


class Identification(Body):
    """Fields that clients send along and that change no answer."""

    neutral: ClassVar[Neutral] = {
        "moderation": (),
        # Cached prefixes are in memory, as long as there is room.
        "prompt_cache_retention": ("in_memory", "in-memory"),
        "prompt_cache_options": ({}, {"mode": "implicit"}),
    }

    user: str | None = Field(
        None, description="On whose share it is served, where the server has at most one API key."
    )
    metadata: Object | None = None
    store: Literal[False] | None = None
    service_tier: Literal["auto", "default"] | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None


class EngineFields(Body):
    """How the engine treats a request."""

    neutral: ClassVar[Neutral] = {"kv_transfer_params": ({},), "ec_transfer_params": ({},)}

    model: str | None = Field(None, description="None: the model that is served.")
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    priority: int | None = Field(
        0, description="0 is the most urgent. Needs the policy 'priority'."
    )
    cache_salt: str | None = Field(None, description="Only requests with it share cached prefixes.")
    # Each chunk of a stream repeats it.
    request_id: str | None = Field(
        None, max_length=MAX_REQUEST_ID, description="Part of the answer's id."
    )


SAME_NAME = tuple(
    name
    for name, known in declared(SamplingParams).items()
    if known.wire == "field" and name not in ("max_tokens", "logit_bias", "structured_outputs")
)
"""Sampling parameters that a body has under their own names, with their own values."""


def _wire_type(hint: Any) -> Any:
    """The form in which a body has values of a parameter's type."""
    members = set(get_args(hint)) or {hint}
    if Sequence[str] in members:
        return TextOrTexts if str in members else Texts
    return Integers if Sequence[int] in members else (members - {type(None)}).pop()


if TYPE_CHECKING:
    SamplingFields = Body
else:
    _HINTS = get_type_hints(SamplingParams)
    SamplingFields = create_model(
        "SamplingFields",
        __base__=Body,
        **{
            name: (
                _wire_type(_HINTS[name]) | None,
                Field(None, description=declared(SamplingParams)[name].help),
            )
            for name in SAME_NAME
        },
    )


class GeneratingBody(Identification, EngineFields, SamplingFields):
    """What ``/v1/completions`` and ``/v1/chat/completions`` share. None stands for the default."""

    neutral: ClassVar[Neutral] = {
        **Identification.neutral,
        **EngineFields.neutral,
        "length_penalty": (1.0,),
        "use_beam_search": (False,),
        "early_stopping": (False,),
        "logits_processors": ([],),
        "guided_decoding_backend": (),
        "vllm_xargs": ({},),
    }

    max_tokens: int | None = None
    logit_bias: Biases | None = None
    stop: TextOrTexts | None = None
    prompt_logprobs: int | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: Object | None = None
    guided_json: TextOrObject | None = None
    guided_regex: str | None = None
    guided_choice: Texts | None = None
    guided_grammar: str | None = None
    guided_whitespace_pattern: str | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
