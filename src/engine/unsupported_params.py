"""The parameters of vLLM's SamplingParams that are known here and refused by name."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Any

from ..errors import InvalidInputError


@dataclass(frozen=True, slots=True, kw_only=True, init=False, repr=False, eq=False)
class UnsupportedParams:
    """Fields that may only have the value that changes nothing, their default.

    So a program written for vLLM is told which of its parameters would not have been heeded. Who
    builds one of them moves its field to ``SamplingParams``; ``docs/sampling_parameters.md`` has a
    line for each.
    """

    prompt_logprob_token_ids: Any = field(default=None, repr=False)
    prompt_logprob_start: Any = field(default=None, repr=False)
    logprob_token_ids: Any = field(default=None, repr=False)
    flat_logprobs: Any = field(default=False, repr=False)
    guided_decoding: Any = field(default=None, repr=False)
    extra_args: Any = field(default=None, repr=False)
    output_kind: Any = field(default=None, repr=False)
    stream_interval: Any = field(default=None, repr=False)
    skip_clone: Any = field(default=False, repr=False)
    skip_reading_prefix_cache: Any = field(default=None, repr=False)
    thinking_token_budget: Any = field(default=None, repr=False)
    repetition_detection: Any = field(default=None, repr=False)
    routed_experts_prompt_start: Any = field(default=0, repr=False)
    trace_decode_token_ids: Any = field(default=None, repr=False)

    def refuse_unsupported(self) -> None:
        """Raises InvalidInputError naming the first field that is not at its default."""
        for known in fields(UnsupportedParams):
            value = getattr(self, known.name)
            if value is not known.default and value != known.default:
                raise InvalidInputError(
                    known.name, value, f"is not supported; only {known.default!r} is accepted"
                )


UNSUPPORTED = frozenset(known.name for known in fields(UnsupportedParams))
