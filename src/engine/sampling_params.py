"""Sampling parameters of one request: frozen and validated at construction."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..errors import InvalidInputError
from ..validation import is_int, is_list, is_number
from . import edit_checks as checks
from .structured_outputs import StructuredOutputs
from .unsupported_params import UnsupportedParams

MAX_STOP_STRINGS = 64
MAX_LOGPROBS = 20
MAX_CONTINUATIONS = 16_384
_SEED_BITS = 64
_FLAGS = (
    "ignore_eos",
    "include_stop_str_in_output",
    "skip_special_tokens",
    "spaces_between_special_tokens",
    "detokenize",
)


def _require_float(name: str, value: object, low: float, high: float, limit: str) -> float:
    if not is_number(value):
        raise InvalidInputError(name, value, f"must be a number {limit}")
    # Exact for integers of any size, which may be too large for a float, and false for NaN.
    if not low <= value <= high:
        raise InvalidInputError(name, value, f"must be {limit}")
    return float(value)


def _require_int(name: str, value: object, low: int, high: float, limit: str) -> None:
    if not is_int(value) or not low <= value <= high:
        raise InvalidInputError(name, value, f"must be an integer {limit}")


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams(UnsupportedParams):
    """How the tokens of a request are chosen and when it stops. Names as in vLLM.

    ``docs/sampling_parameters.md`` says in which order they act, and which are refused.

    Attributes:
        n: continuations to generate of the prompt, which is computed once; 1 at temperature 0,
            where all are the same. Each counts as a request.
        best_of: generate so many, and return the ``n`` of the largest cumulative log-probability,
            the best first, with their ``logprobs``. Not for ``stream``.
        temperature: 0 means greedy (the highest logit, ties to the lowest token id); otherwise
            logits are divided by it. Finite, 0 or more.
        top_p: keep the smallest set of tokens whose probability reaches this. In (0, 1].
        top_k: keep the k likeliest tokens; 0 or -1 keeps all.
        min_p: drop tokens less likely than min_p times the likeliest. In [0, 1].
        max_tokens: most tokens to generate, 1 or more; None means up to ``max_model_len``.
        stop: strings that end generation; the text is cut before the string.
        stop_token_ids: token ids that end generation, besides the model's own end tokens. The one
            that does is in ``token_ids`` and not in ``text``.
        ignore_eos: do not stop at the model's end-of-sequence tokens.
        seed: 64-bit seed of this request's random numbers; None derives one from the engine's.
            Continuation i has ``seed + i``, and the tokens of a request with that seed.
        logprobs: give the log-probability of each sampled token, and of so many of the likeliest, 0
            to 20; None gives none.
        prompt_logprobs: the same of each prompt token but the first. Such a request computes all of
            its prompt: it reads nothing from the prefix cache.
        repetition_penalty: logits of tokens of the prompt or the output are divided by it if
            positive, else multiplied. 1 changes nothing.
        presence_penalty: taken from the logits of tokens of the output. From -2 to 2.
        frequency_penalty: the same, times how often the token was generated. From -2 to 2.
        logit_bias: added to the logits of these token ids. From -100 to 100.
        allowed_token_ids: only these can be sampled.
        bad_words: texts that are not generated, also behind a space: the last token of one is
            banned where the others were just generated.
        min_tokens: tokens before which no end token and no token of ``stop_token_ids`` can be
            sampled; a stop string that is complete before it does not count either.
        logits_processors: functions of (the output's token ids, a float32 row of logits) that
            return the row to sample from. Slow: each step with one waits for the device.
        include_stop_str_in_output: keep the stop string, or the text of the stop token.
        skip_special_tokens: special tokens have no text.
        spaces_between_special_tokens: False is refused where the tokenizer has such spaces.
        detokenize: False leaves the text empty.
        truncate_prompt_tokens: keep that many of the prompt's last tokens; -1 as many as leave
            room for one token of output.
        structured_outputs: a JSON schema, regex, choice or grammar that the text meets, unless it
            is cut by its length; of an answer in chat, the content behind its reasoning. Not with
            ``min_tokens`` or ``bad_words``.

    Precedence when several conditions are met by one token: stop token, stop string, length.

    Raises:
        InvalidInputError: a field is outside its limits.
    """

    n: int = 1
    best_of: int | None = None
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    max_tokens: int | None = 16
    stop: str | Sequence[str] | None = None
    stop_token_ids: Sequence[int] | None = None
    ignore_eos: bool = False
    seed: int | None = None
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] | None = field(default=None, hash=False)
    allowed_token_ids: Sequence[int] | None = None
    bad_words: Sequence[str] | None = None
    min_tokens: int = 0
    logits_processors: Sequence[Callable[..., Any]] | None = None
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    detokenize: bool = True
    truncate_prompt_tokens: int | None = None
    structured_outputs: StructuredOutputs | None = field(default=None, hash=False)
    stop_strings: tuple[str, ...] = field(init=False, repr=False, compare=False, default=())

    def __post_init__(self) -> None:
        put = object.__setattr__
        put(
            self,
            "temperature",
            _require_float(
                "temperature", self.temperature, 0.0, 1e6, "finite, from 0 to 1,000,000"
            ),
        )
        top_p = _require_float("top_p", self.top_p, 0.0, 1.0, "above 0 and at most 1")
        if top_p == 0.0:
            raise InvalidInputError("top_p", self.top_p, "must be above 0 and at most 1")
        put(self, "top_p", top_p)
        _require_int("top_k", self.top_k, -1, math.inf, "from -1 up (-1 and 0 keep all tokens)")
        put(self, "min_p", _require_float("min_p", self.min_p, 0.0, 1.0, "from 0 to 1"))
        if self.max_tokens is not None:
            _require_int("max_tokens", self.max_tokens, 1, math.inf, "of 1 or more, or None")
        for name in _FLAGS:
            if not isinstance(getattr(self, name), bool):
                raise InvalidInputError(name, getattr(self, name), "must be True or False")
        if self.seed is not None:
            bound = 1 << (_SEED_BITS - 1)
            _require_int("seed", self.seed, -bound, 2 * bound - 1, "that fits in 64 bits, or None")
        for name in ("logprobs", "prompt_logprobs"):
            number = getattr(self, name)
            if number is not None:
                _require_int(name, number, 0, MAX_LOGPROBS, f"from 0 to {MAX_LOGPROBS}, or None")
        self._check_counts()
        put(self, "stop_strings", self._checked_stop_strings())
        if not isinstance(self.stop, str) and self.stop is not None:
            put(self, "stop", self.stop_strings)
        if self.stop_strings and not self.detokenize:
            raise InvalidInputError("stop", self.stop, "needs text: detokenize must be True")
        token_ids = () if self.stop_token_ids is None else self.stop_token_ids
        put(self, "stop_token_ids", checks.checked_token_ids("stop_token_ids", token_ids))
        put(
            self,
            "repetition_penalty",
            checks.checked_repetition_penalty(self.repetition_penalty),
        )
        for name in ("presence_penalty", "frequency_penalty"):
            put(self, name, checks.checked_penalty(name, getattr(self, name)))
        put(self, "logit_bias", checks.checked_logit_bias(self.logit_bias))
        put(self, "allowed_token_ids", checks.checked_allowed_token_ids(self.allowed_token_ids))
        put(self, "bad_words", checks.checked_bad_words(self.bad_words))
        checks.checked_min_tokens(self.min_tokens, self.max_tokens)
        put(self, "logits_processors", checks.checked_processors(self.logits_processors))
        checks.checked_truncation(self.truncate_prompt_tokens)
        outputs = self.structured_outputs
        if outputs is not None and not isinstance(outputs, StructuredOutputs):
            limit = "must be a StructuredOutputs"
            raise InvalidInputError("structured_outputs", outputs, limit)
        if outputs is not None:
            checks.checked_beside_a_constraint(self.min_tokens, self.bad_words or ())
        self.refuse_unsupported()

    @property
    def num_generated(self) -> int:
        """Continuations that are generated for the ``n`` that are returned."""
        return self.n if self.best_of is None else self.best_of

    def _check_counts(self) -> None:
        _require_int("n", self.n, 1, MAX_CONTINUATIONS, f"from 1 to {MAX_CONTINUATIONS:,}")
        if self.n > 1 and self.temperature == 0.0:
            raise InvalidInputError("n", self.n, "must be 1 at temperature 0: all are the same")
        if self.best_of is not None:
            _require_int(
                "best_of", self.best_of, self.n, MAX_CONTINUATIONS, f"from n = {self.n} up"
            )
            if self.best_of > 1 and self.temperature == 0.0:
                limit = "must be 1 at temperature 0: all are the same"
                raise InvalidInputError("best_of", self.best_of, limit)

    def _checked_stop_strings(self) -> tuple[str, ...]:
        stop = self.stop
        if stop is None:
            return ()
        strings = (stop,) if isinstance(stop, str) else stop
        if not is_list(strings) or len(strings) > MAX_STOP_STRINGS:
            raise InvalidInputError(
                "stop", stop, f"must be a string or a list of at most {MAX_STOP_STRINGS} strings"
            )
        for string in strings:
            if not isinstance(string, str) or not string:
                raise InvalidInputError("stop", stop, "every stop string must be non-empty text")
        return tuple(strings)
