"""The engine argument ``speculative_config``: its keys, values and refusals."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ...errors import InvalidInputError
from ...params.checks import count, keyed
from ..runner import MAX_DRAFT_TOKENS

METHODS = ("ngram", "suffix", "prediction")
MODEL_METHODS = ("draft_model", "mtp", "eagle3")
"""Methods whose drafter is a model."""
_NUM_TOKENS = 8
_NUM_TOKENS_OF = {"draft_model": 5, "mtp": 3, "eagle3": 5}
_LOOKUP_MAX, _LOOKUP_MIN = 4, 2
_MAX_LOOKUP = 64
# Other methods of vLLM.
_OTHERS = ("eagle", "medusa", "mlp_speculator", "ngram_gpu")
_NUMBERS = ("num_speculative_tokens", "prompt_lookup_max", "prompt_lookup_min")
_NGRAM = ("ngram", "[ngram]")  # vLLM's names of the drafter that is no model
_KEYS = ("method", *_NUMBERS, "model", "draft_tensor_parallel_size", "quantization")
QUANTIZATIONS = ("fp8",)
"""Formats to which a drafter's weights can be quantised at load."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeculativeConfig:
    """The checked argument.

    Attributes:
        method: one of :data:`METHODS` or :data:`MODEL_METHODS`.
        num_speculative_tokens: maximum number of draft tokens per row.
        prompt_lookup_max, prompt_lookup_min: lengths of the n-grams that "ngram" looks up.
        model: folder or hub id of the drafter of "draft_model" and "eagle3".
        quantization: one of :data:`QUANTIZATIONS`, for the weights of the drafter's model; None
            follows its checkpoint.
    """

    method: str
    num_speculative_tokens: int = _NUM_TOKENS
    prompt_lookup_max: int = _LOOKUP_MAX
    prompt_lookup_min: int = _LOOKUP_MIN
    model: str | None = None
    quantization: str | None = None

    @property
    def has_model(self) -> bool:
        """Whether the drafter is a model."""
        return self.method in MODEL_METHODS

    @property
    def reads_target(self) -> bool:
        """Whether the drafter reads hidden states of the target, and uses parts of its module."""
        return self.method in ("mtp", "eagle3")

    def arguments(self) -> dict[str, Any]:
        """The dict from which :func:`speculative` makes this config; serialisable as JSON."""
        names = ["method", "num_speculative_tokens"]
        names += ["prompt_lookup_max", "prompt_lookup_min"] * (self.method == "ngram")
        names += [name for name in ("model", "quantization") if getattr(self, name) is not None]
        return {name: getattr(self, name) for name in names}

    def serves(self, prediction: Sequence[int]) -> bool:
        """Whether a request with this prediction may have draft tokens."""
        return self.method != "prediction" or len(prediction) > 0


def speculative(name: str, value: Any) -> SpeculativeConfig | None:
    """Check the argument: a dict with vLLM's names, or its JSON text. An empty dict is None.

    Raises:
        InvalidInputError: names the key, the value and the limit.
    """
    if isinstance(value, SpeculativeConfig):
        return value
    from ...params.foreign import SPECULATION, refuse  # a large table that few calls need

    given = dict(keyed(name, value, (*_KEYS, *SPECULATION), '{"method": "ngram"}'))
    for key in SPECULATION.keys() & given.keys():
        refuse(key, given.pop(key), SPECULATION, within=name)
    if not given:
        return None
    _name_ngram(given)
    method = given.get("method")
    methods = (*METHODS, *MODEL_METHODS)
    if method not in methods:
        limit = f"must be one of {', '.join(methods)}"
        if method in _OTHERS:
            limit += f"; {method} is not supported yet"
        raise InvalidInputError(f"{name}.method", method, limit)
    model = _drafter_model(name, method, given)
    quantization = _drafter_quantization(name, method, given)
    if method != "ngram":
        for key in ("prompt_lookup_max", "prompt_lookup_min"):
            if given.get(key) is not None:
                limit = f"must be absent: method {method} has no such limit"
                raise InvalidInputError(f"{name}.{key}", given[key], limit)
    high = {"num_speculative_tokens": MAX_DRAFT_TOKENS}
    numbers = {
        key: count(1, high.get(key, _MAX_LOOKUP))(f"{name}.{key}", given[key])
        for key in _NUMBERS
        if given.get(key) is not None
    }
    least, most = numbers.get("prompt_lookup_min"), numbers.get("prompt_lookup_max")
    if least is not None and most is not None and most < least:
        limit = f"must be at least prompt_lookup_min = {least}"
        raise InvalidInputError(f"{name}.prompt_lookup_max", most, limit)
    numbers.setdefault("num_speculative_tokens", _NUM_TOKENS_OF.get(method, _NUM_TOKENS))
    numbers["prompt_lookup_max"] = most or max(_LOOKUP_MAX, least or 0)
    numbers["prompt_lookup_min"] = least or min(_LOOKUP_MIN, most or _LOOKUP_MIN)
    return SpeculativeConfig(method=method, model=model, quantization=quantization, **numbers)


def _name_ngram(given: dict[str, Any]) -> None:
    """Set the method that vLLM infers from ``"model": "ngram"``, which names no model."""
    names = (given.get("method"), given.get("model"))
    if names != (None, None) and all(name in (None, *_NGRAM) for name in names):
        given |= {"method": "ngram", "model": None}


def _drafter_model(name: str, method: str, given: Mapping[str, Any]) -> str | None:
    """The drafter's folder or hub id, which "draft_model" and "eagle3" need and other methods do
    not take."""
    model, num_ranks = given.get("model"), given.get("draft_tensor_parallel_size")
    if method in ("draft_model", "eagle3"):
        if not isinstance(model, (str, os.PathLike)) or not os.fspath(model):
            limit = f"must be the folder or hub id of the drafter: method {method} needs one"
            raise InvalidInputError(f"{name}.model", model, limit)
        model = os.fspath(model)
    elif model is not None:
        where = "the target model has the drafter" if method == "mtp" else "no model drafts"
        limit = f"must be absent: with method {method}, {where}"
        raise InvalidInputError(f"{name}.model", model, limit)
    if num_ranks is not None and (method not in MODEL_METHODS or num_ranks != 1):
        limit = "must be 1 or absent: a model drafts on one rank"
        raise InvalidInputError(f"{name}.draft_tensor_parallel_size", num_ranks, limit)
    return model


def _drafter_quantization(name: str, method: str, given: Mapping[str, Any]) -> str | None:
    """The format of the drafter's weights, for methods with a model."""
    quantization: str | None = given.get("quantization")
    if quantization is None:
        return None
    field = f"{name}.quantization"
    if method not in MODEL_METHODS:
        limit = f"must be absent: with method {method}, no model drafts"
        raise InvalidInputError(field, quantization, limit)
    if quantization not in QUANTIZATIONS:
        limit = f"must be {' or '.join(QUANTIZATIONS)}, or absent for the checkpoint's own"
        raise InvalidInputError(field, quantization, limit)
    return quantization
