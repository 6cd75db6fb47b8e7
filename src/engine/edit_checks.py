"""Checks of the sampling parameters that edit logits, and of those about prompt and text."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ..errors import InvalidInputError
from ..validation import is_int, is_list, is_number

MAX_LOGIT_BIAS = 1024
MAX_BAD_WORDS = 1000
MAX_TOKEN_IDS = 1 << 18  # no vocabulary has more
_BIAS_LIMIT = 100.0


def checked_penalty(name: str, value: object) -> float:
    """A presence or frequency penalty."""
    if not is_number(value) or not -2.0 <= value <= 2.0:
        raise InvalidInputError(name, value, "must be a number from -2 to 2")
    return float(value)


def checked_repetition_penalty(value: object) -> float:
    """Above 0 and finite, also as the float32 it becomes, and so that logits can be divided."""
    if not is_number(value) or not 1e-3 <= value <= 1e3:
        raise InvalidInputError("repetition_penalty", value, "must be a number from 0.001 to 1000")
    return float(value)


def checked_logit_bias(value: object) -> dict[int, float] | None:
    """By token id. Ids may be written as text, as JSON has to."""
    if value is None:
        return None
    if not isinstance(value, Mapping) or len(value) > MAX_LOGIT_BIAS:
        limit = f"must be a dict of at most {MAX_LOGIT_BIAS} token ids and biases"
        raise InvalidInputError("logit_bias", value, limit)
    checked: dict[int, float] = {}
    for key, bias in value.items():
        token_id = _token_id(key)
        if token_id is None:
            raise InvalidInputError("logit_bias", key, "every key must be an integer >= 0")
        if token_id in checked:
            raise InvalidInputError("logit_bias", key, "is given twice")
        if not is_number(bias) or not -_BIAS_LIMIT <= bias <= _BIAS_LIMIT:
            raise InvalidInputError("logit_bias", bias, "every bias must be from -100 to 100")
        checked[token_id] = float(bias)
    return checked


def _token_id(key: object) -> int | None:
    if isinstance(key, str) and key.isascii() and key.isdigit() and len(key) < 20:
        return int(key)
    return key if is_int(key) and key >= 0 else None


def checked_token_ids(name: str, value: Any) -> tuple[int, ...]:
    """A list of token ids; whether the vocabulary has them is for the model to say."""
    if not is_list(value):
        raise InvalidInputError(name, value, "must be a list of token ids")
    if len(value) > MAX_TOKEN_IDS:
        raise InvalidInputError(name, f"{len(value)} ids", f"must be at most {MAX_TOKEN_IDS} ids")
    for token_id in value:
        if not is_int(token_id) or token_id < 0:
            raise InvalidInputError(name, value, "every id must be an integer >= 0")
    return tuple(value)


def checked_allowed_token_ids(value: Any) -> tuple[int, ...] | None:
    if value is None:
        return None
    token_ids = checked_token_ids("allowed_token_ids", value)
    if not token_ids:
        raise InvalidInputError("allowed_token_ids", value, "must not be empty")
    return token_ids


def checked_bad_words(value: Any) -> tuple[str, ...]:
    if value is None:
        return ()
    if not is_list(value) or len(value) > MAX_BAD_WORDS:
        limit = f"must be a list of at most {MAX_BAD_WORDS} words"
        raise InvalidInputError("bad_words", value, limit)
    for word in value:
        if not isinstance(word, str) or not word.strip():
            raise InvalidInputError("bad_words", value, "every word must be text with a letter")
    return tuple(dict.fromkeys(value))


def checked_min_tokens(value: object, max_tokens: int | None) -> None:
    if not is_int(value) or value < 0:
        raise InvalidInputError("min_tokens", value, "must be an integer of 0 or more")
    if value > (math.inf if max_tokens is None else max_tokens):
        raise InvalidInputError("min_tokens", value, f"must be at most max_tokens = {max_tokens}")


def checked_beside_a_constraint(min_tokens: int, bad_words: Sequence[str]) -> None:
    """Refuses what bans tokens where ``structured_outputs`` may allow no others."""
    if min_tokens:
        limit = (
            "must be 0 with structured_outputs: behind a text that is complete, nothing but an end "
            "token may follow"
        )
        raise InvalidInputError("min_tokens", min_tokens, limit)
    if bad_words:
        limit = "must be empty with structured_outputs, which may allow nothing else at a place"
        raise InvalidInputError("bad_words", list(bad_words), limit)


def checked_truncation(value: object) -> None:
    if value is not None and not (is_int(value) and (value == -1 or value >= 1)):
        limit = "must be an integer of 1 or more, or -1 for as many as fit"
        raise InvalidInputError("truncate_prompt_tokens", value, limit)


def checked_processors(value: Any) -> tuple[Callable[..., Any], ...]:
    if value is None:
        return ()
    if not is_list(value) or not all(callable(processor) for processor in value):
        raise InvalidInputError("logits_processors", value, "must be a list of functions")
    return tuple(value)
