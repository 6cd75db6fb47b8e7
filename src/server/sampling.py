"""``SamplingParams`` from the body of a request. What its fields may be is said there."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from ..engine.sampling_params import SamplingParams
from ..engine.structured_outputs import StructuredOutputs
from ..errors import InvalidInputError
from .protocol.chat import ChatRequest
from .protocol.completions import CompletionRequest
from .protocol.fields import GeneratingBody, ResponseFormat

_SAME_NAME = (
    "n",
    "best_of",
    "min_tokens",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "seed",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "allowed_token_ids",
    "bad_words",
    "stop",
    "stop_token_ids",
    "ignore_eos",
    "include_stop_str_in_output",
    "skip_special_tokens",
    "spaces_between_special_tokens",
    "truncate_prompt_tokens",
    "prompt_logprobs",
)
_PARAMS = frozenset(known.name for known in fields(SamplingParams) if known.init)
# Python functions do not come over the wire.
_GENERATE_PARAMS = _PARAMS - {"logits_processors"}
_STRUCTURES = frozenset(known.name for known in fields(StructuredOutputs) if known.init)


def completion_params(body: CompletionRequest) -> SamplingParams:
    """With ``echo`` and ``logprobs`` those of the prompt are computed too. ``max_tokens`` = 0 is
    for ``echo``: one token is computed, which the answer leaves out.

    Raises:
        InvalidInputError: a field is outside its limits.
    """
    chosen = _shared(body)
    chosen["max_tokens"] = 1 if is_echo_alone(body) else body.max_tokens
    chosen["logprobs"] = body.logprobs
    if body.echo and body.logprobs is not None:
        chosen["prompt_logprobs"] = max(body.logprobs, body.prompt_logprobs or 0)
    elif body.stream and body.prompt_logprobs is not None:
        _refuse_prompt_logprobs(body.prompt_logprobs)
    return SamplingParams(**chosen)


def is_echo_alone(body: CompletionRequest) -> bool:
    """Whether only the prompt is asked for."""
    return bool(body.echo) and body.max_tokens == 0


def chat_params(body: ChatRequest, structure: StructuredOutputs | None = None) -> SamplingParams:
    """
    Args:
        structure: that the choice of a tool asks for.

    Raises:
        InvalidInputError: a field is outside its limits.
    """
    if body.stream and body.prompt_logprobs is not None:
        _refuse_prompt_logprobs(body.prompt_logprobs)
    if body.top_logprobs and not body.logprobs:
        raise InvalidInputError("top_logprobs", body.top_logprobs, "needs logprobs = true")
    chosen = _shared(body)
    both = body.max_completion_tokens, body.max_tokens
    chosen["max_tokens"] = both[1] if both[0] is None else both[0]
    chosen["logprobs"] = (body.top_logprobs or 0) if body.logprobs else None
    if structure is not None:
        if "structured_outputs" in chosen:
            limit = "must be none, auto or not given beside a response_format"
            raise InvalidInputError("tool_choice", body.tool_choice, limit)
        chosen["structured_outputs"] = structure
    # The reader of the answer makes its own text; the engine needs one only to find stop strings.
    return SamplingParams(**chosen, detokenize=bool(body.stop))


def generate_params(given: Mapping[str, Any], *, with_text: bool) -> SamplingParams:
    """From the ``sampling_params`` of ``/inference/v1/generate``: without ``max_tokens``, as many
    as are left of the context.

    Raises:
        InvalidInputError: a name is unknown, or a value outside its limits.
    """
    chosen = dict(given)
    for name in chosen:
        if name not in _GENERATE_PARAMS:
            limit = "is not supported"
            raise InvalidInputError(f"sampling_params.{name}", chosen[name], limit)
    chosen.setdefault("max_tokens", None)
    if not with_text:
        chosen.setdefault("detokenize", bool(chosen.get("stop")))
    if chosen.get("structured_outputs") is not None:
        chosen["structured_outputs"] = _structured_outputs(chosen["structured_outputs"])
    if isinstance(chosen.get("logit_bias"), Mapping):
        chosen["logit_bias"] = _logit_bias(chosen["logit_bias"])
    return SamplingParams(**chosen)


def _shared(body: GeneratingBody) -> dict[str, Any]:
    chosen = {name: value for name in _SAME_NAME if (value := getattr(body, name)) is not None}
    if body.logit_bias is not None:
        chosen["logit_bias"] = _logit_bias(body.logit_bias)
    structure = _structure_of(body)
    if structure is not None:
        chosen["structured_outputs"] = structure
    return chosen


def _refuse_prompt_logprobs(value: object) -> None:
    raise InvalidInputError("prompt_logprobs", value, "is not for stream = true")


def _logit_bias(given: Mapping[Any, float]) -> dict[int, float]:
    """JSON's keys are text."""
    try:
        return {int(key): bias for key, bias in given.items()}
    except ValueError as error:
        limit = "its keys must be token ids"
        raise InvalidInputError("logit_bias", dict(given), limit) from error


def _structure_of(body: GeneratingBody) -> StructuredOutputs | None:
    """The one constraint that a body asks for, by whichever of its fields."""
    found: dict[str, StructuredOutputs] = {}
    if body.structured_outputs is not None:
        found["structured_outputs"] = _structured_outputs(body.structured_outputs)
    guided = {
        name: value
        for name in ("json", "regex", "choice", "grammar")
        if (value := getattr(body, f"guided_{name}")) is not None
    }
    if guided:
        whitespace = body.guided_whitespace_pattern
        found["guided_" + next(iter(guided))] = StructuredOutputs(
            **guided, whitespace_pattern=whitespace
        )
    elif body.guided_whitespace_pattern is not None:
        limit = "is for guided_json"
        raise InvalidInputError("guided_whitespace_pattern", body.guided_whitespace_pattern, limit)
    if body.response_format is not None and body.response_format.type != "text":
        found["response_format"] = _response_format(body.response_format)
    if len(found) > 1:
        raise InvalidInputError(list(found)[1], list(found), "only one of these may be given")
    return next(iter(found.values()), None)


def _structured_outputs(given: Any) -> StructuredOutputs:
    if not isinstance(given, Mapping):
        raise InvalidInputError("structured_outputs", given, "must be an object")
    unknown = sorted(set(given) - _STRUCTURES)
    if unknown:
        name = f"structured_outputs.{unknown[0]}"
        raise InvalidInputError(name, given[unknown[0]], "is not supported")
    return StructuredOutputs(**given)


def _response_format(given: ResponseFormat) -> StructuredOutputs:
    if given.type == "json_object":
        return StructuredOutputs(json_object=True)
    schema = None if given.json_schema is None else given.json_schema.schema_
    if schema is None:
        limit = "must be a JSON schema"
        raise InvalidInputError("response_format.json_schema.schema", schema, limit)
    return StructuredOutputs(json=schema)
