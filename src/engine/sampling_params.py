"""Sampling parameters of one request: declared once, validated at construction and assignment."""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, FrozenInstanceError, dataclass, field, fields
from enum import Enum, IntEnum
from typing import TYPE_CHECKING, Any

from ..errors import InvalidInputError, nearest
from ..params.checks import as_float, as_int, flag, integer, is_list, number
from ..params.declare import check_field, check_fields, describe, param
from . import edit_checks as checks
from .structured_outputs import StructuredOutputs

MAX_STOP_STRINGS = 1024
MAX_CONTINUATIONS = 16_384


class RequestOutputKind(Enum):
    """What each output of a stream contains; see ``SamplingParams.output_kind``. Values as in
    vLLM."""

    CUMULATIVE = 0
    DELTA = 1
    FINAL_ONLY = 2


class SamplingType(IntEnum):
    """How the tokens of a request are drawn. Values as in vLLM."""

    GREEDY = 0
    RANDOM = 1
    RANDOM_SEED = 2


if TYPE_CHECKING:
    from dataclasses import dataclass as _assignable
else:

    def _assignable(**options: Any) -> Callable[[type], type]:
        """As ``dataclass``, but an assignment is checked as the constructor checks that field, and
        leaves the object as it was if it is refused."""

        def decorate(cls: type) -> type:
            # Frozen: the constructor sets fields directly, where an assignment would check each.
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
    kept = _checked_unsupported(name, value) if name in UNSUPPORTED else value
    vars(params)[name] = check_field(SamplingParams, name, kept)
    # Fields that limit each other are checked when a request is made, after all assignments.


@_assignable(kw_only=True, init=False, repr=False, eq=False)
class UnsupportedParams:
    """Parameters of vLLM's SamplingParams that are refused by name unless their value has no
    effect: the default, or a value in ``harmless``.

    A parameter that is implemented later moves to ``SamplingParams``. Each has a line in
    ``docs/sampling_parameters.md``.
    """

    prompt_logprob_token_ids: Any = field(default=None, repr=False)
    prompt_logprob_start: Any = field(default=None, repr=False)
    guided_decoding: Any = field(default=None, repr=False)
    stream_interval: Any = field(default=None, repr=False)
    thinking_token_budget: Any = field(default=None, repr=False, metadata={"harmless": (-1,)})
    repetition_detection: Any = field(default=None, repr=False)
    routed_experts_prompt_start: Any = field(default=0, repr=False)
    trace_decode_token_ids: Any = field(default=None, repr=False)


_UNSUPPORTED = {known.name: known for known in fields(UnsupportedParams)}
UNSUPPORTED = frozenset(_UNSUPPORTED)


def _checked_unsupported(name: str, value: Any) -> Any:
    """The default of an unsupported parameter.

    Raises:
        InvalidInputError: the value would have an effect.
    """
    known = _UNSUPPORTED[name]
    for harmless in (known.default, *known.metadata.get("harmless", ())):
        if value is harmless or (type(value) is type(harmless) and value == harmless):
            return known.default
    limit = f"is not supported; only {known.default!r} is accepted"
    raise InvalidInputError(name, value, limit)


def _min_p_distance(min_p: float) -> float:
    """-log of the float32 ``min_p``, infinite at 0."""
    (rounded,) = struct.unpack("f", struct.pack("f", min_p))
    return -math.log(rounded) if rounded > 0 else math.inf


def _n(name: str, value: Any) -> int:
    kept = as_int(value)
    if kept is not None and kept > MAX_CONTINUATIONS:
        raise InvalidInputError(name, value, f"{name} must be at most {MAX_CONTINUATIONS:,}")
    return int(integer(1, MAX_CONTINUATIONS, f"from 1 to {MAX_CONTINUATIONS:,}")(name, value))


def _min_tokens(name: str, value: Any) -> int:
    kept = as_int(value)
    if kept is None or kept < 0:
        limit = f"{name} must be greater than or equal to 0, an integer"
        raise InvalidInputError(name, value, limit)
    return kept


def _seed(name: str, value: Any) -> int | None:
    """A seed; None for -1, as in vLLM."""
    limit = "that fits in 64 bits, or None"
    kept = integer(-(1 << 63), (1 << 64) - 1, limit)(name, value)
    return None if kept == -1 else int(kept)


def _num_logprobs(name: str, value: Any) -> int:
    """A number of most likely tokens. True is 1, as in vLLM."""
    limit = "from 0 up, -1 for the whole vocabulary, or None"
    return 1 if value is True else int(integer(-1, math.inf, limit)(name, value))


def _stop(name: str, value: Any) -> list[str]:
    """A string, a list of strings, or None for none."""
    if value is None:
        return []
    strings = [value] if isinstance(value, str) else value
    if not is_list(strings) or len(strings) > MAX_STOP_STRINGS:
        limit = f"must be a string or a list of at most {MAX_STOP_STRINGS:,} strings"
        raise InvalidInputError(name, value, limit)
    for string in strings:
        if not isinstance(string, str) or not string:
            raise InvalidInputError(name, value, "every stop string must be non-empty text")
    return list(strings)


def _output_kind(name: str, value: Any) -> RequestOutputKind:
    """A member, or its number."""
    if isinstance(value, RequestOutputKind):
        return value
    known = {kind.value: kind for kind in RequestOutputKind}
    kept = as_int(value)
    if kept is None or kept not in known:
        limit = f"must be one of {', '.join(f'RequestOutputKind.{k.name}' for k in known.values())}"
        raise InvalidInputError(name, value, limit)
    return known[kept]


def _structured(name: str, value: Any) -> StructuredOutputs:
    if not isinstance(value, StructuredOutputs):
        raise InvalidInputError(name, value, "must be a StructuredOutputs")
    return value


@_assignable(unsafe_hash=True)
class SamplingParams(UnsupportedParams):
    """How a request's tokens are chosen and when it stops. Names as in vLLM.

    ``docs/sampling_parameters.md`` gives the order in which they apply, and those that are refused.
    If one token meets several stop conditions, the precedence is: stop token, stop string, length.

    Fields may be assigned (``params.max_tokens = 16``): the new value is checked at once. Lists and
    dicts may be changed in place. They, and fields that limit each other, are checked when a
    request is made. Requests that were made before keep the old values. The hash follows the
    values, except those of lists and dicts, so do not assign fields of a key of a dict.

    The first arguments may be positional, in vLLM's order: ``n`` to
    ``logprob_token_ids``.

    Raises:
        InvalidInputError: a field is outside its limits.
    """

    n: int = param(
        1,
        "Number of continuations of the prompt, which is computed once; must be 1 at temperature "
        "0, where all would be equal. Each counts as a request.",
        _n,
        flag="--n",
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
    repetition_penalty: float = param(
        1.0,
        "For tokens of the prompt or the answer: divide positive logits by this, multiply "
        "negative ones. 1 changes nothing. From 1e-10 to 1e10, so that scaled logits are finite.",
        number(1e-10, 1e10, "from 1e-10 to 1e10"),
        is_of_model=True,
    )
    temperature: float = param(
        1.0,
        "0 is greedy: the highest logit, ties to the lowest token id. Otherwise logits are divided "
        "by it. At most 1,000,000, where all tokens are equally likely; vLLM accepts at most 2.",
        number(0.0, 1e6, "finite, from 0 to 1,000,000"),
        is_of_model=True,
    )
    top_p: float = param(
        1.0,
        "Keep the smallest set of most likely tokens whose probability reaches this value.",
        number(0.0, 1.0, "above 0 and at most 1", is_above=True),
        is_of_model=True,
        stage="cut",
    )
    top_k: int = param(
        0,
        "Keep only this many most likely tokens; 0 or -1 keeps all.",
        integer(-1, math.inf, "from -1 up (-1 and 0 keep all tokens)"),
        is_of_model=True,
        stage="cut",
        sent=lambda top_k: max(top_k, 0),
    )
    min_p: float = param(
        0.0,
        "Drop tokens whose probability is below this fraction of the most likely token's.",
        number(0.0, 1.0, "from 0 to 1"),
        is_of_model=True,
        stage="cut",
        sent=_min_p_distance,
    )
    seed: int | None = param(
        None,
        "64-bit random seed of this request. Continuation i uses seed + i, and gives the same "
        "tokens as a request with that seed. -1 is None.",
        _seed,
        absent="derived from the engine's",
    )
    stop: str | Sequence[str] | None = param(
        None,
        "Text that ends the answer and is cut from it. Several may be given, at most 1,024: each "
        "token's text is searched for each of them.",
        _stop,
        takes_none=False,
        is_hashed=False,
    )
    stop_token_ids: Sequence[int] | None = param(
        None,
        "Token ids that end generation, in addition to the model's own end tokens. The one that "
        "ends it is in token_ids but not in text.",
        checks.checked_token_ids,
        takes_none=False,
        flag=None,
        is_hashed=False,
    )
    ignore_eos: bool = param(False, "Continue past the model's end-of-sequence tokens.", flag())
    max_tokens: int | None = param(
        16,
        "Maximum number of tokens to generate.",
        integer(1, math.inf, "of 1 or more, or None"),
        takes_none=True,
        absent="up to max_model_len",
        is_of_model=True,
    )
    min_tokens: int = param(
        0,
        "Ban end tokens and stop_token_ids until this many tokens are generated. A stop string "
        "that is complete earlier does not count either. With structured_outputs they are banned "
        "only where another token is allowed.",
        _min_tokens,
    )
    logprobs: int | None = param(
        None,
        "Return the log-probability of each sampled token, and of this many most likely tokens: at "
        "most max_logprobs of the engine; -1: all of the vocabulary.",
        _num_logprobs,
        flag=None,
        wire="object",
    )
    prompt_logprobs: int | None = param(
        None,
        "Like logprobs, for each prompt token but the first. Such a request computes its whole "
        "prompt: it reads nothing from the prefix cache.",
        _num_logprobs,
        flag=None,
    )
    logprob_token_ids: Sequence[int] | None = param(
        None,
        "Return the log-probabilities of these tokens, at most 128, besides that of each sampled "
        "token, in place of those of the most likely tokens. Not with processed_logprobs.",
        checks.checked_logprob_token_ids,
        takes_none=False,
        flag=None,
        is_hashed=False,
    )
    _: KW_ONLY
    flat_logprobs: bool = param(
        False,
        "Return log-probabilities as a FlatLogprobs, a few flat lists, instead of a list of dicts.",
        flag(),
        flag=None,
        wire="object",
    )
    detokenize: bool = param(True, "False leaves the text empty.", flag(), flag=None, wire="object")
    skip_special_tokens: bool = param(True, "Omit special tokens from text.", flag(), flag=None)
    spaces_between_special_tokens: bool = param(
        True, "False is refused if the tokenizer writes such spaces.", flag(), flag=None
    )
    include_stop_str_in_output: bool = param(
        False, "Keep the stop string, or the text of the stop token.", flag(), flag=None
    )
    output_kind: RequestOutputKind = param(
        RequestOutputKind.CUMULATIVE,
        "What AsyncLLM.generate yields: CUMULATIVE, the whole answers so far; DELTA, what is new; "
        "FINAL_ONLY, the whole answers once, at the end. LLM.generate returns whole answers.",
        _output_kind,
        flag=None,
        wire="object",
    )
    skip_clone: bool = param(
        False, "No effect: each request has its own copy.", flag(), flag=None, wire="object"
    )
    structured_outputs: StructuredOutputs | None = param(
        None,
        "A JSON schema, regex, choice or grammar that the text satisfies, unless it is cut by its "
        "length; for chat answers, the content after the reasoning.",
        _structured,
        flag=None,
        is_hashed=False,
    )
    logit_bias: Mapping[int, float] | None = param(
        None,
        "Values added to the logits of these token ids. From -100 to 100, OpenAI's range.",
        checks.checked_logit_bias,
        flag=None,
        is_hashed=False,
    )
    allowed_token_ids: Sequence[int] | None = param(
        None,
        "Sample from these token ids only.",
        checks.checked_allowed_token_ids,
        flag=None,
        is_hashed=False,
    )
    bad_words: Sequence[str] | None = param(
        None,
        "Words that are not generated, with or without a leading space: the last token of a word "
        "is banned right after the others were generated. Several may be given, at most 1,000: "
        "each is compared with the end of the answer for each token.",
        checks.checked_bad_words,
        takes_none=False,
        flag="--bad-word",
        is_hashed=False,
    )
    skip_reading_prefix_cache: bool | None = param(
        None,
        "True: compute the whole prompt and read nothing from the prefix cache. False is refused "
        "with prompt_logprobs.",
        flag("must be True, False or None"),
        absent="True with prompt_logprobs, else False",
        flag=None,
        wire="object",
    )
    best_of: int | None = param(
        None,
        "Generate this many continuations and return the n with the largest cumulative "
        "log-probability, best first, with logprobs. Not for streams.",
        integer(-math.inf, math.inf, "from n up"),
        flag=None,
    )
    truncate_prompt_tokens: int | None = param(
        None,
        "Keep this many of the prompt's last tokens; -1: as many as leave space for one token of "
        "output.",
        checks.checked_truncation,
        absent="all",
    )
    logits_processors: Sequence[Callable[..., Any]] | None = param(
        None,
        "Functions of (output token ids, float32 row of logits) that return the row to sample "
        "from. Slow: each step with one waits for the device.",
        checks.checked_processors,
        takes_none=False,
        flag=None,
        wire=None,
        is_hashed=False,
    )
    extra_args: Mapping[str, Any] | None = param(
        None,
        "Arguments for the classes of the engine argument logits_processors, which read them.",
        checks.checked_extra_args,
        is_hashed=False,
        flag=None,
        wire="object",
    )
    is_frozen: bool = field(init=False, repr=False, compare=False, default=False)

    def __post_init__(self) -> None:
        for name, known in _UNSUPPORTED.items():
            value = getattr(self, name)
            if value is not known.default:
                object.__setattr__(self, name, _checked_unsupported(name, value))
        check_fields(self)
        self._check_jointly()

    def _check_jointly(self) -> None:
        """Check fields that limit each other."""
        if self.stop and not self.detokenize:
            raise InvalidInputError("stop", self.stop, "needs text: detokenize must be True")
        same = "{} must be 1 when using greedy sampling (temperature 0): all would be equal"
        if self.n > 1 and self.temperature == 0.0:
            raise InvalidInputError("n", self.n, same.format("n"))
        if self.best_of is not None:
            integer(self.n, MAX_CONTINUATIONS, f"from n = {self.n} up")("best_of", self.best_of)
            if self.best_of > 1 and self.temperature == 0.0:
                raise InvalidInputError("best_of", self.best_of, same.format("best_of"))
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            limit = f"min_tokens must be less than or equal to max_tokens = {self.max_tokens}"
            raise InvalidInputError("min_tokens", self.min_tokens, limit)
        given = self.logprob_token_ids
        if given and self.logprobs not in (None, 0, len(given)):
            limit = f"must be None, or the number of logprob_token_ids, {len(given)}"
            raise InvalidInputError("logprobs", self.logprobs, limit)
        if self.skip_reading_prefix_cache is False and self.prompt_logprobs is not None:
            limit = "must be None or True with prompt_logprobs, which compute the whole prompt"
            raise InvalidInputError("skip_reading_prefix_cache", False, limit)

    @classmethod
    def from_optional(cls, **given: Any) -> SamplingParams:
        """As the constructor, but None means the default for every parameter, except that
        ``max_tokens`` stays None. Biases of ``logit_bias`` are clipped to -100 to 100."""
        bias = given.get("logit_bias")
        if isinstance(bias, Mapping):
            given["logit_bias"] = {
                key: value if as_float(value) is None else min(max(value, -100.0), 100.0)
                for key, value in bias.items()
            }
        return cls(
            **{k: value for k, value in given.items() if value is not None or k == "max_tokens"}
        )

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """``stop`` as a tuple."""
        return tuple(self.stop or ())

    @property
    def num_generated(self) -> int:
        """Number of continuations to generate, of which ``n`` are returned."""
        return self.n if self.best_of is None else self.best_of

    @property
    def num_logprobs(self) -> int | None:
        """Number of log-probabilities besides that of the sampled token; None for none."""
        return len(self.logprob_token_ids) if self.logprob_token_ids else self.logprobs

    @property
    def all_stop_token_ids(self) -> set[int]:
        """``stop_token_ids`` as a set; the end tokens of a model are known when a request is
        made."""
        return set(self.stop_token_ids or ())

    @property
    def sampling_type(self) -> SamplingType:
        if self.temperature == 0.0:
            return SamplingType.GREEDY
        return SamplingType.RANDOM if self.seed is None else SamplingType.RANDOM_SEED

    def clone(self) -> SamplingParams:
        """A copy, independent of this object, whose fields may be assigned."""
        copied = object.__new__(SamplingParams)
        values = {
            name: value.copy() if isinstance(value, (list, dict)) else value
            for name, value in vars(self).items()
        }
        vars(copied).update(values, is_frozen=False)
        return copied

    def frozen(self) -> SamplingParams:
        """These parameters for a request: a copy that no assignment changes, with its own lists and
        dicts.

        Raises:
            InvalidInputError: a list or dict was changed to one that is refused, or fields that
                were assigned contradict each other.
        """
        if self.is_frozen:
            return self
        checked = object.__new__(SamplingParams)
        kept = vars(checked)
        kept.update(vars(self), is_frozen=True)
        for name, value in vars(self).items():
            if isinstance(value, (list, dict)):
                kept[name] = check_field(SamplingParams, name, value)
        checked._check_jointly()
        return checked


SamplingParams.__doc__ = f"{SamplingParams.__doc__}\n    Attributes:\n{describe(SamplingParams, 8)}"
