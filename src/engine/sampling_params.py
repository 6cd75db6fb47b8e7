"""Sampling parameters of one request: declared once, validated at construction and assignment."""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import FrozenInstanceError, dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any

from ..errors import InvalidInputError, nearest
from ..params.checks import flag, integer, is_list, number
from ..params.declare import check_fields, describe, param
from . import edit_checks as checks
from .structured_outputs import StructuredOutputs

MAX_STOP_STRINGS = 64
MAX_LOGPROBS = 20
MAX_CONTINUATIONS = 16_384
_LOGPROBS = integer(0, MAX_LOGPROBS, f"from 0 to {MAX_LOGPROBS}, or None")
_SEED = integer(-(1 << 63), (1 << 64) - 1, "that fits in 64 bits, or None")


if TYPE_CHECKING:
    from dataclasses import dataclass as _assignable
else:

    def _assignable(**options: Any) -> Callable[[type], type]:
        """As ``dataclass``, but an assignment is validated like the constructor, and leaves the
        object as it was if it is refused."""

        def decorate(cls: type) -> type:
            # Frozen: the constructor sets fields directly, where assignment validates all.
            made = dataclass(frozen=True, **options)(cls)
            made.__setattr__ = _assign
            return made

        return decorate


def _assign(params: SamplingParams, name: str, value: Any) -> None:
    if params.is_frozen:
        raise FrozenInstanceError(
            f"{name} cannot be assigned: these parameters are of a request that was made; make "
            f"others with dataclasses.replace(params, {name}=...)"
        )
    known = [each.name for each in fields(params) if each.init]
    if name not in known:
        raise AttributeError(
            f"SamplingParams has no parameter {name!r}{nearest(name, known)}", name=name, obj=params
        )
    vars(params).update(vars(replace(params, **{name: value})))


@_assignable(kw_only=True, init=False, repr=False, eq=False)
class UnsupportedParams:
    """Parameters of vLLM's SamplingParams that are refused by name unless they have their default.

    A parameter that is implemented later moves to ``SamplingParams``. Each has a line in
    ``docs/sampling_parameters.md``.
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
        """Raises InvalidInputError for the first field that does not have its default."""
        for known in fields(UnsupportedParams):
            value = getattr(self, known.name)
            if value is not known.default and value != known.default:
                raise InvalidInputError(
                    known.name, value, f"is not supported; only {known.default!r} is accepted"
                )


UNSUPPORTED = frozenset(known.name for known in fields(UnsupportedParams))


def _min_p_distance(min_p: float) -> float:
    """-log of the float32 ``min_p``, infinite at 0."""
    (rounded,) = struct.unpack("f", struct.pack("f", min_p))
    return -math.log(rounded) if rounded > 0 else math.inf


def _stop(name: str, value: Any) -> Any:
    """Check a string or a list of strings."""
    strings = (value,) if isinstance(value, str) else value
    if not is_list(strings) or len(strings) > MAX_STOP_STRINGS:
        limit = f"must be a string or a list of at most {MAX_STOP_STRINGS} strings"
        raise InvalidInputError(name, value, limit)
    for string in strings:
        if not isinstance(string, str) or not string:
            raise InvalidInputError(name, value, "every stop string must be non-empty text")
    return value if isinstance(value, str) else tuple(value)


def _structured(name: str, value: Any) -> StructuredOutputs:
    if not isinstance(value, StructuredOutputs):
        raise InvalidInputError(name, value, "must be a StructuredOutputs")
    return value


@_assignable(kw_only=True, unsafe_hash=True)
class SamplingParams(UnsupportedParams):
    """How a request's tokens are chosen and when it stops. Names as in vLLM.

    ``docs/sampling_parameters.md`` gives the order in which they apply, and those that are refused.
    If one token meets several stop conditions, the precedence is: stop token, stop string, length.

    Fields may be assigned (``params.max_tokens = 16``): the new value is validated like an argument
    of the constructor. Requests that were made before keep the old value. The hash follows the
    values, so do not assign fields of a key of a dict.

    Raises:
        InvalidInputError: a field is outside its limits.
    """

    n: int = param(
        1,
        "Number of continuations of the prompt, which is computed once; must be 1 at temperature "
        "0, where all would be equal. Each counts as a request.",
        integer(1, MAX_CONTINUATIONS, f"from 1 to {MAX_CONTINUATIONS:,}"),
        flag="--n",
    )
    best_of: int | None = param(
        None,
        "Generate this many continuations and return the n with the largest cumulative "
        "log-probability, best first, with logprobs. Not for streams.",
        integer(-math.inf, math.inf, "from n up"),
        flag=None,
    )
    temperature: float = param(
        1.0,
        "0 is greedy: the highest logit, ties to the lowest token id. Otherwise logits are divided "
        "it.",
        number(0.0, 1e6, "finite, from 0 to 1,000,000"),
        is_of_model=True,
    )
    top_k: int = param(
        0,
        "Keep only this many most likely tokens; 0 or -1 keeps all.",
        integer(-1, math.inf, "from -1 up (-1 and 0 keep all tokens)"),
        is_of_model=True,
        stage="cut",
        sent=lambda top_k: max(top_k, 0),
    )
    top_p: float = param(
        1.0,
        "Keep the smallest set of most likely tokens whose probability reaches this value.",
        number(0.0, 1.0, "above 0 and at most 1", is_above=True),
        is_of_model=True,
        stage="cut",
    )
    min_p: float = param(
        0.0,
        "Drop tokens whose probability is below this fraction of the most likely token's.",
        number(0.0, 1.0, "from 0 to 1"),
        is_of_model=True,
        stage="cut",
        sent=_min_p_distance,
    )
    max_tokens: int | None = param(
        16,
        "Maximum number of tokens to generate.",
        integer(1, math.inf, "of 1 or more, or None"),
        takes_none=True,
        absent="up to max_model_len",
        is_of_model=True,
    )
    stop: str | Sequence[str] | None = param(
        None, "Text that ends the answer and is cut from it. Several may be given.", _stop
    )
    stop_token_ids: Sequence[int] | None = param(
        None,
        "Token ids that end generation, in addition to the model's own end tokens. The one that "
        "ends it is in token_ids but not in text.",
        checks.checked_token_ids,
        takes_none=False,
        flag=None,
    )
    ignore_eos: bool = param(False, "Continue past the model's end-of-sequence tokens.", flag())
    seed: int | None = param(
        None,
        "64-bit random seed of this request. Continuation i uses seed + i, and gives the same "
        "tokens as a request with that seed.",
        _SEED,
        absent="derived from the engine's",
    )
    logprobs: int | None = param(
        None,
        "Return the log-probability of each sampled token, and of this many most likely tokens.",
        _LOGPROBS,
        flag=None,
        wire="object",
    )
    prompt_logprobs: int | None = param(
        None,
        "Like logprobs, for each prompt token but the first. Such a request computes its whole "
        "prompt: it reads nothing from the prefix cache.",
        _LOGPROBS,
        flag=None,
    )
    repetition_penalty: float = param(
        1.0,
        "For tokens of the prompt or the answer: divide positive logits by this, multiply "
        "negative ones. 1 changes nothing.",
        # Bounded so that its float32 value is finite and not 0.
        number(1e-3, 1e3, "from 0.001 to 1000"),
        is_of_model=True,
    )
    presence_penalty: float = param(
        0.0,
        "Subtract this from the logits of tokens that the answer contains. From -2 to 2.",
        number(-2.0, 2.0, "from -2 to 2"),
    )
    frequency_penalty: float = param(
        0.0,
        "Subtract this times the token's count in the answer from its logit. From -2 to 2.",
        number(-2.0, 2.0, "from -2 to 2"),
    )
    logit_bias: Mapping[int, float] | None = param(
        None,
        "Values added to the logits of these token ids. From -100 to 100.",
        checks.checked_logit_bias,
        flag=None,
        is_hashed=False,
    )
    allowed_token_ids: Sequence[int] | None = param(
        None, "Sample from these token ids only.", checks.checked_allowed_token_ids, flag=None
    )
    bad_words: Sequence[str] | None = param(
        None,
        "Words that are not generated, with or without a leading space: the last token of a word "
        "is banned right after the others were generated. Several may be given.",
        checks.checked_bad_words,
        takes_none=False,
        flag="--bad-word",
    )
    min_tokens: int = param(
        0,
        "Ban end tokens and stop_token_ids until this many tokens are generated. A stop string "
        "that is complete earlier does not count either.",
        integer(0, math.inf, "of 0 or more"),
    )
    logits_processors: Sequence[Callable[..., Any]] | None = param(
        None,
        "Functions of (output token ids, float32 row of logits) that return the row to sample "
        "from. Slow: each step with one waits for the device.",
        checks.checked_processors,
        takes_none=False,
        flag=None,
        wire=None,
    )
    include_stop_str_in_output: bool = param(
        False, "Keep the stop string, or the text of the stop token.", flag(), flag=None
    )
    skip_special_tokens: bool = param(True, "Omit special tokens from text.", flag(), flag=None)
    spaces_between_special_tokens: bool = param(
        True, "False is refused if the tokenizer writes such spaces.", flag(), flag=None
    )
    detokenize: bool = param(True, "False leaves the text empty.", flag(), flag=None, wire="object")
    truncate_prompt_tokens: int | None = param(
        None,
        "Keep this many of the prompt's last tokens; -1: as many as leave space for one token of "
        "output.",
        checks.checked_truncation,
        absent="all",
    )
    structured_outputs: StructuredOutputs | None = param(
        None,
        "A JSON schema, regex, choice or grammar that the text satisfies, unless it is cut by its "
        "length; for chat answers, the content after the reasoning. Not with min_tokens or "
        "bad_words.",
        _structured,
        flag=None,
        is_hashed=False,
    )
    stop_strings: tuple[str, ...] = field(init=False, repr=False, compare=False, default=())
    is_frozen: bool = field(init=False, repr=False, compare=False, default=False)

    def __post_init__(self) -> None:
        check_fields(self)
        stop = () if self.stop is None else self.stop
        strings = (stop,) if isinstance(stop, str) else tuple(stop)
        object.__setattr__(self, "stop_strings", strings)
        if strings and not self.detokenize:
            raise InvalidInputError("stop", self.stop, "needs text: detokenize must be True")
        same = "must be 1 at temperature 0: all would be equal"
        if self.n > 1 and self.temperature == 0.0:
            raise InvalidInputError("n", self.n, same)
        if self.best_of is not None:
            integer(self.n, MAX_CONTINUATIONS, f"from n = {self.n} up")("best_of", self.best_of)
            if self.best_of > 1 and self.temperature == 0.0:
                raise InvalidInputError("best_of", self.best_of, same)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            limit = f"must be at most max_tokens = {self.max_tokens}"
            raise InvalidInputError("min_tokens", self.min_tokens, limit)
        if self.structured_outputs is not None:
            checks.checked_beside_a_constraint(self.min_tokens, self.bad_words or ())
        self.refuse_unsupported()

    @property
    def num_generated(self) -> int:
        """Number of continuations to generate, of which ``n`` are returned."""
        return self.n if self.best_of is None else self.best_of

    def frozen(self) -> SamplingParams:
        """These parameters for a request: a copy that no assignment changes."""
        if self.is_frozen:
            return self
        copy = object.__new__(SamplingParams)
        vars(copy).update(vars(self), is_frozen=True)
        return copy


SamplingParams.__doc__ = f"{SamplingParams.__doc__}\n    Attributes:\n{describe(SamplingParams, 8)}"
