"""Fields that the bodies of all generating endpoints share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Literal, get_args, get_type_hints

from pydantic import BaseModel, ConfigDict, Field, create_model, model_validator

from ...engine.sampling_params import SamplingParams
from ...params.declare import declared
from .shapes import Biases, Integers, Object, Objects, TextOrObject, TextOrTexts, Texts

MAX_REQUEST_ID = 256
# Maximum number of unknown fields named in one error.
_MAX_UNKNOWN = 3


# Unsupported fields with the values that have no effect; null always has none.
Neutral = Mapping[str, Sequence[Any]]


class Body(BaseModel):
    """A JSON object of known fields; values of other types are refused."""

    model_config = ConfigDict(extra="forbid", strict=True)

    neutral: ClassVar[Neutral] = {}

    @model_validator(mode="before")
    @classmethod
    def _with_few_unknown_fields(cls, body: Any) -> Any:
        """Drops fields without effect, and all but the first few unknown ones, which suffice."""
        if not isinstance(body, dict):
            return body
        known = {field.alias or name for name, field in cls.model_fields.items()}
        kept: dict[Any, Any] = {}
        num_unknown = 0
        for key, value in body.items():
            if key in known:
                kept[key] = value
            elif num_unknown < _MAX_UNKNOWN and not cls._is_neutral(key, value):
                kept[key] = value
                num_unknown += 1
        return kept

    @classmethod
    def _is_neutral(cls, key: str, value: Any) -> bool:
        if key not in cls.neutral:
            return False
        # Python treats 0 and False as equal.
        return value is None or any(
            value == one and isinstance(value, bool) == isinstance(one, bool)
            for one in cls.neutral[key]
        )


class StreamOptions(Body):
    neutral: ClassVar[Neutral] = {"include_obfuscation": (False,)}

    include_usage: bool | None = Field(None, description="Send a last chunk with the usage.")
    continuous_usage_stats: bool | None = Field(None, description="Send the usage in each chunk.")

    @property
    def is_empty(self) -> bool:
        return not self.model_fields_set


class JsonSchema(Body):
    name: str | None = None
    description: str | None = None
    schema_: Object | None = Field(None, alias="schema")
    strict: bool | None = Field(None, description="No effect: schemas are always enforced.")


class ResponseFormat(Body):
    type: Literal["text", "json_object", "json_schema", "structural_tag"]
    json_schema: JsonSchema | None = None
    format: Object | None = Field(None, description="Of a structural_tag: its format.")
    structures: Objects | None = Field(None, description="Of a structural_tag: its tags.")
    triggers: Texts | None = Field(None, description="Of a structural_tag, beside structures.")


class Identification(Body):
    """Fields that do not affect the answer."""

    neutral: ClassVar[Neutral] = {
        "moderation": (),
        # Cached prefixes are in memory until they are evicted.
        "prompt_cache_retention": ("in_memory", "in-memory"),
        "prompt_cache_options": ({}, {"mode": "implicit"}),
    }

    user: str | None = Field(
        None,
        description="Owner under the policy 'fair', if the server has at most one API key.",
    )
    metadata: Object | None = None
    store: Literal[False] | None = None
    service_tier: Literal["auto", "default"] | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None


class EngineFields(Body):
    """Fields that the engine uses."""

    neutral: ClassVar[Neutral] = {"kv_transfer_params": ({},), "ec_transfer_params": ({},)}

    model: str | None = Field(None, description="null: the served model.")
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    priority: int | None = Field(
        0, description="0 is the most urgent. Needs the policy 'priority'."
    )
    cache_salt: str | None = Field(None, description="Share cached prefixes within this salt only.")
    # The id is repeated in each chunk of a stream.
    request_id: str | None = Field(
        None, max_length=MAX_REQUEST_ID, description="Part of the answer's id."
    )


SAME_NAME = tuple(
    name
    for name, known in declared(SamplingParams).items()
    if known.wire == "field" and name not in ("max_tokens", "logit_bias", "structured_outputs")
)
"""Sampling parameters that a body contains under the same names, with the same values."""


def _wire_type(hint: Any) -> Any:
    """The type of a parameter in a body."""
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
    """Fields of ``/v1/completions`` and ``/v1/chat/completions``; None means the default."""

    neutral: ClassVar[Neutral] = {
        **Identification.neutral,
        **EngineFields.neutral,
        "length_penalty": (1.0,),
        "use_beam_search": (False,),
        "early_stopping": (False,),
        "logits_processors": ([],),
        "guided_decoding_backend": (),
        "thinking_token_budget": (-1,),
        "repetition_detection": (),
        "return_token_offsets": (False,),
    }

    max_tokens: int | None = None
    logit_bias: Biases | None = None
    stop: TextOrTexts | None = None
    prompt_logprobs: int | None = None
    vllm_xargs: Object | None = None
    logprob_token_ids: Integers | None = Field(
        None,
        description="Return the log-probabilities of these tokens, at most 128, in place of those "
        "of the most likely ones. Needs logprobs.",
    )
    response_format: ResponseFormat | None = None
    structured_outputs: Object | None = None
    guided_json: TextOrObject | None = None
    guided_regex: str | None = None
    guided_choice: Texts | None = None
    guided_grammar: str | None = None
    guided_whitespace_pattern: str | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
