"""Converts the body of a request to ``SamplingParams``, which check the limits."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from ..engine.config import GENERATION_CONFIGS
from ..engine.edit_checks import MAX_LOGIT_BIAS
from ..engine.sampling_params import UNSUPPORTED, SamplingParams
from ..engine.structured_outputs import StructuredOutputs
from ..errors import InvalidInputError
from ..llm import LLM
from ..params.checks import is_int
from ..params.declare import declared
from .protocol.endpoints import BodyError, ChatRequest, CompletionRequest, guided
from .protocol.fields import SAME_NAME, GeneratingBody, ResponseFormat

_ON_WIRE = {name for name, known in declared(SamplingParams).items() if known.wire is not None}
_GENERATE_PARAMS = _ON_WIRE | UNSUPPORTED
# JSON's syntax of integers. int() also accepts spaces, "1_0" and digits of other scripts, so two
# different keys could mean one token.
_TOKEN_ID = re.compile("0|[1-9][0-9]{0,18}")
_STRUCTURES = frozenset(known.name for known in fields(StructuredOutputs) if known.init)


@dataclass(frozen=True, slots=True)
class SamplingDefaults:
    """Defaults for fields that a request omits.

    Attributes:
        values: from the generation config, by names of ``SamplingParams``, without ``max_tokens``.
        max_tokens: default; None: the rest of the context.
        most_tokens: upper limit of every request's ``max_tokens``; None: no limit.
    """

    values: Mapping[str, Any] = field(default_factory=dict)
    max_tokens: int | None = None
    most_tokens: int | None = None

    @classmethod
    def of(cls, llm: LLM) -> SamplingDefaults:
        """The defaults for a loaded model. As in vLLM, ``max_new_tokens`` of a chosen generation
        config is also an upper limit.

        Raises:
            InvalidInputError: the generation config has a value that is refused.
        """
        llm.get_default_sampling_params()
        values = dict(llm.default_sampling)
        max_tokens = values.pop("max_tokens", None)
        is_chosen = llm.config.generation_config not in GENERATION_CONFIGS
        return cls(values, max_tokens, max_tokens if is_chosen else None)

    def max_tokens_for(self, given: int | None) -> int | None:
        """``max_tokens`` of a request that specifies ``given``."""
        chosen = self.max_tokens if given is None else given
        # A value outside its limits is kept, so that the error shows it as sent.
        is_cut = self.most_tokens is not None and chosen is not None and chosen > self.most_tokens
        return self.most_tokens if is_cut else chosen


def completion_params(body: CompletionRequest, defaults: SamplingDefaults) -> SamplingParams:
    """The parameters for ``/v1/completions``. ``echo`` with ``logprobs`` also computes those of the
    prompt. ``max_tokens`` = 0 requires ``echo``: one token is computed and discarded.

    Raises:
        InvalidInputError: a field is outside its limits.
    """
    chosen = _shared(body, defaults)
    chosen["max_tokens"] = 1 if is_echo_alone(body) else defaults.max_tokens_for(body.max_tokens)
    chosen["logprobs"] = _logprobs(body, body.logprobs)
    if is_echo_alone(body) and body.logprob_token_ids:
        limit = "must be empty with max_tokens = 0: no output tokens are generated"
        raise BodyError("logprob_token_ids", body.logprob_token_ids, limit)
    if body.echo and body.logprobs is not None:
        chosen["prompt_logprobs"] = max(body.logprobs, body.prompt_logprobs or 0)
    elif body.stream and body.prompt_logprobs is not None:
        _refuse_prompt_logprobs(body.prompt_logprobs)
    return SamplingParams(**chosen)


def _logprobs(body: CompletionRequest | ChatRequest, num_top: int | None) -> int | None:
    """The parameter ``logprobs``: ``logprob_token_ids`` replace the most likely tokens."""
    if body.logprob_token_ids and num_top is None:
        raise BodyError("logprob_token_ids", body.logprob_token_ids, "needs logprobs")
    return None if body.logprob_token_ids else num_top


def is_echo_alone(body: CompletionRequest) -> bool:
    """Whether the answer consists of the prompt only."""
    return bool(body.echo) and body.max_tokens == 0


def chat_params(
    body: ChatRequest, defaults: SamplingDefaults, structure: StructuredOutputs | None = None
) -> SamplingParams:
    """
    Args:
        structure: constraint for a forced tool call.

    Raises:
        InvalidInputError: a field is outside its limits.
    """
    if body.stream and body.prompt_logprobs is not None:
        _refuse_prompt_logprobs(body.prompt_logprobs)
    if body.top_logprobs and not body.logprobs:
        raise BodyError("top_logprobs", body.top_logprobs, "needs logprobs = true")
    chosen = _shared(body, defaults)
    both = body.max_completion_tokens, body.max_tokens
    chosen["max_tokens"] = defaults.max_tokens_for(both[1] if both[0] is None else both[0])
    chosen["logprobs"] = _logprobs(body, (body.top_logprobs or 0) if body.logprobs else None)
    if structure is not None:
        if "structured_outputs" in chosen:
            limit = "must be none, auto or omitted with a response_format"
            raise BodyError("tool_choice", body.tool_choice, limit)
        chosen["structured_outputs"] = structure
    # The answer's reader decodes tokens itself. The engine needs text only for stop strings and for
    # the tokens of the prompt.
    needs_text = bool(body.stop) or body.prompt_logprobs is not None
    return SamplingParams(**chosen, detokenize=needs_text)


def generate_params(
    given: Mapping[str, Any] | None, defaults: SamplingDefaults, *, with_text: bool
) -> SamplingParams:
    """The parameters from ``sampling_params`` of ``/inference/v1/generate``. None means the
    default; for ``max_tokens`` that is the rest of the context. From the generation config only
    ``max_new_tokens`` is used, and only without ``max_tokens``.

    Raises:
        InvalidInputError: a name is unknown, or a value outside its limits.
    """
    for name, value in (given or {}).items():
        if name not in _GENERATE_PARAMS:
            raise InvalidInputError(f"sampling_params.{name}", value, "is not supported")
    chosen = {name: value for name, value in (given or {}).items() if value is not None}
    if "max_tokens" not in (given or {}):
        chosen["max_tokens"] = defaults.max_tokens
    chosen.setdefault("max_tokens", None)
    _check_seed(chosen.get("seed"))
    if not with_text:
        chosen.setdefault("detokenize", bool(chosen.get("stop")))
    if chosen.get("structured_outputs") is not None:
        chosen["structured_outputs"] = _structured_outputs(chosen["structured_outputs"])
    if isinstance(chosen.get("logit_bias"), Mapping):
        chosen["logit_bias"] = _logit_bias(chosen["logit_bias"])
    return SamplingParams(**chosen)


def _check_seed(seed: object) -> None:
    """Apply OpenAI's limits, a signed 64-bit integer; ``SamplingParams`` accepts more."""
    if is_int(seed) and not -(1 << 63) <= seed < 1 << 63:
        raise BodyError("seed", seed, f"must be from {-(1 << 63)} to {(1 << 63) - 1}")


def _shared(body: GeneratingBody, defaults: SamplingDefaults) -> dict[str, Any]:
    given = {name: value for name in SAME_NAME if (value := getattr(body, name)) is not None}
    chosen = {**defaults.values, **given}
    _check_seed(given.get("seed"))
    if body.logit_bias is not None:
        chosen["logit_bias"] = _logit_bias(body.logit_bias)
    if body.vllm_xargs:
        chosen["extra_args"] = body.vllm_xargs
    structure = _structure_of(body)
    if structure is not None:
        chosen["structured_outputs"] = structure
    return chosen


def _refuse_prompt_logprobs(value: object) -> None:
    raise BodyError("prompt_logprobs", value, "is not supported with stream = true")


def _logit_bias(given: Mapping[Any, float]) -> dict[int, float]:
    """Converts JSON's keys, which are strings, to token ids."""
    if len(given) > MAX_LOGIT_BIAS:
        limit = f"must have at most {MAX_LOGIT_BIAS} token ids"
        raise BodyError("logit_bias", f"{len(given)} keys", limit)
    wrong = [key for key in given if not _TOKEN_ID.fullmatch(key)]
    if wrong:
        raise BodyError("logit_bias", ", ".join(wrong), 'its keys must be token ids, as "17"')
    return {int(key): bias for key, bias in given.items()}


def _structure_of(body: GeneratingBody) -> StructuredOutputs | None:
    """The constraint of a body, from whichever field specifies it."""
    found: dict[str, StructuredOutputs] = {}
    if body.structured_outputs:
        found["structured_outputs"] = _structured_outputs(body.structured_outputs)
    kinds = guided(body)
    if len(kinds) > 1:
        names = [f"guided_{kind}" for kind in kinds]
        raise BodyError(names[1], ", ".join(names), "only one of these may be given")
    if kinds:
        constraint = {kinds[0]: getattr(body, f"guided_{kinds[0]}")}
        whitespace = body.guided_whitespace_pattern
        found[f"guided_{kinds[0]}"] = StructuredOutputs(**constraint, whitespace_pattern=whitespace)
    elif body.guided_whitespace_pattern is not None:
        limit = "requires guided_json"
        raise BodyError("guided_whitespace_pattern", body.guided_whitespace_pattern, limit)
    if body.response_format is not None:
        structure = _response_format(body.response_format)
        if structure is not None:
            found["response_format"] = structure
    if len(found) > 1:
        raise BodyError(list(found)[1], ", ".join(found), "only one of these may be given")
    return next(iter(found.values()), None)


def _structured_outputs(given: Any) -> StructuredOutputs:
    if not isinstance(given, Mapping):
        raise BodyError("structured_outputs", given, "must be an object")
    unknown = sorted(set(given) - _STRUCTURES)
    if unknown:
        name = f"structured_outputs.{unknown[0]}"
        raise BodyError(name, given[unknown[0]], "is not supported")
    return StructuredOutputs(**given)


def _response_format(given: ResponseFormat) -> StructuredOutputs | None:
    tag = {
        name: value
        for name in ("format", "structures", "triggers")
        if (value := getattr(given, name)) is not None
    }
    if tag and given.type != "structural_tag":
        name = next(iter(tag))
        limit = f"is for the type 'structural_tag', not for '{given.type}'"
        raise BodyError(f"response_format.{name}", tag[name], limit)
    if given.type == "structural_tag" and given.json_schema is None:
        return StructuredOutputs(structural_tag=tag)
    if given.type != "json_schema":
        if given.json_schema is not None:
            limit = f"is for the type 'json_schema', not for '{given.type}'"
            value = given.json_schema.model_dump(by_alias=True, exclude_unset=True)
            raise BodyError("response_format.json_schema", value, limit)
        return StructuredOutputs(json_object=True) if given.type == "json_object" else None
    schema = None if given.json_schema is None else given.json_schema.schema_
    if schema is None:
        limit = "must be a JSON schema"
        raise BodyError("response_format.json_schema.schema", schema, limit)
    return StructuredOutputs(json=schema)
