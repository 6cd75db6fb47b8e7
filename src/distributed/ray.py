"""``Generator``: a callable class for Ray Data's ``map_batches``; each actor holds an ``LLM``."""

from __future__ import annotations

import math
import secrets
from collections.abc import Mapping
from dataclasses import fields, replace
from typing import Any

from ..engine.logprob_output import plain_logprobs
from ..engine.outputs import CompletionOutput, RequestOutput
from ..engine.sampling_params import SamplingParams
from ..errors import InvalidInputError
from ..llm import LLM

_PROMPT_COLUMNS = ("prompt", "prompt_token_ids", "messages")
_SAMPLING_FIELDS = frozenset(field.name for field in fields(SamplingParams) if field.init)
_EXACT_FLOAT = 1 << 53  # from here on a float64 may stand for another integer

_Row = dict[str, Any]


class Generator:
    """Generates text for batches of rows.

    ::

        rows.map_batches(
            Generator,
            fn_constructor_kwargs={"model": "Qwen/Qwen3-8B", "tensor_parallel_size": 2},
            compute=ray.data.ActorPoolStrategy(size=4),
            num_gpus=2,  # tensor_parallel_size
            batch_size=256,
            batch_format="pyarrow",
        )

    A row has exactly one of ``prompt`` (text), ``prompt_token_ids`` and ``messages``, and
    optionally ``sampling_params``, a dict that overrides those of the constructor; null counts as
    absent. Its other columns are kept. New columns are ``generated_text``, ``generated_tokens``,
    ``finish_reason``, ``num_input_tokens`` and ``num_generated_tokens``. ``error`` gives the reason
    why a row was refused; the other new columns are then null. Without a seed in the row or the
    constructor, the seed is random: if replicas counted from the same number, equal rows would get
    equal answers.

    The constructor's ``sampling_params`` fix the columns, which must be the same in every batch:

    * With ``n`` above 1, each column of an answer (all but ``num_input_tokens`` and ``error``) is a
    list with an entry per continuation; ``generated_text`` is a list of texts. This also holds for
    a row with n = 1.
    * ``logprobs`` adds ``cumulative_logprob`` and ``logprobs``; ``prompt_logprobs`` adds the same
    for the prompt. An entry is a list per token of ``{"token_id", "logprob", "rank",
    "decoded_token"}``, its own token first; null for the first token of a prompt.

    A row that sets one of these parameters without the constructor is refused.

    Args:
        model, llm_arguments: see :class:`.llm.LLM`.
        sampling_params: defaults for every row: parameters, or a dict of them.

    Raises:
        InvalidInputError: an argument is refused, here or by ``LLM``.
    """

    def __init__(
        self,
        model: str,
        *,
        sampling_params: SamplingParams | Mapping[str, Any] | None = None,
        **llm_arguments: Any,
    ) -> None:
        if isinstance(sampling_params, SamplingParams):
            self._params = sampling_params
        else:
            self._params = _overridden(SamplingParams(), sampling_params or {})
        self._has_lists = self._params.n > 1
        self._llm = LLM(model, **llm_arguments)

    def __call__(self, batch: Any) -> Any:
        """The batch with the new columns: a table for a table (``batch_format="pyarrow"``, which
        keeps integers next to nulls), else a dict of columns."""
        if isinstance(batch, Mapping):
            new = self._generate(_rows_of_columns(batch))
            return {**batch, **{name: [row[name] for row in new] for name in self._types()}}
        if not hasattr(batch, "to_pylist"):
            limit = 'must be a dict of columns or an Arrow table: batch_format="pyarrow"'
            raise InvalidInputError("batch", type(batch).__name__, limit)
        new = self._generate(batch.to_pylist())
        import pyarrow

        for name, type_ in self._types().items():
            column = pyarrow.array([row[name] for row in new], type_)
            position = batch.column_names.index(name) if name in batch.column_names else None
            if position is None:
                batch = batch.append_column(name, column)
            else:
                batch = batch.set_column(position, name, column)
        return batch

    def _generate(self, rows: list[_Row]) -> list[_Row]:
        return [self._columns(found) for found in self._llm.generate_iter(map(self._item, rows))]

    def _item(self, row: _Row) -> tuple[Any, SamplingParams] | InvalidInputError:
        try:
            return self._request(row)
        except InvalidInputError as error:
            return error

    def _request(self, row: _Row) -> tuple[Any, SamplingParams]:
        given = [name for name in _PROMPT_COLUMNS if row.get(name) is not None]
        if len(given) != 1:
            limit = f"needs exactly one of {', '.join(_PROMPT_COLUMNS)}, not {len(given)}"
            raise InvalidInputError("row", {name: row[name] for name in given}, limit)
        (name,) = given
        params = _overridden(self._params, row.get("sampling_params") or {})
        self._check_columns(params)
        if params.seed is None:
            params = replace(params, seed=secrets.randbits(64))
        if name == "messages":
            return self._llm.read_messages(row[name]), params
        return {name: row[name]}, params

    def _check_columns(self, params: SamplingParams) -> None:
        """Raise InvalidInputError if the columns cannot hold a row's results."""
        if params.n > 1 and not self._has_lists:
            limit = "must be 1 unless n of the constructor's sampling_params is above 1"
            raise InvalidInputError("n", params.n, limit)
        for name in ("logprobs", "prompt_logprobs"):
            if getattr(params, name) is not None and getattr(self._params, name) is None:
                limit = f"must be null unless the constructor's sampling_params have {name}"
                raise InvalidInputError(name, getattr(params, name), limit)

    def _columns(self, result: RequestOutput | Exception) -> _Row:
        if isinstance(result, Exception):
            return {**dict.fromkeys(self._types()), "error": str(result)}
        answers = [_answer_columns(answer) for answer in result.outputs]
        columns: _Row = answers[0]
        if self._has_lists:
            columns = {name: [answer[name] for answer in answers] for name in columns}
        columns["num_input_tokens"] = len(result.prompt_token_ids)
        if result.prompt_logprobs is not None:
            columns["prompt_logprobs"] = plain_logprobs(result.prompt_logprobs)
        columns["error"] = None
        return {name: columns.get(name) for name in self._types()}

    def _types(self) -> dict[str, Any]:
        """The new columns and their Arrow types. They are fixed, because a batch may contain only
        nulls."""
        import pyarrow

        text, number, real = pyarrow.string(), pyarrow.int64(), pyarrow.float64()
        entry = {"token_id": number, "logprob": real, "rank": number, "decoded_token": text}
        places = pyarrow.list_(pyarrow.list_(pyarrow.struct(entry)))
        types = {
            "generated_text": text,
            "generated_tokens": pyarrow.list_(number),
            "finish_reason": text,
            "num_generated_tokens": number,
        }
        if self._params.num_logprobs is not None:
            types |= {"cumulative_logprob": real, "logprobs": places}
        if self._has_lists:
            types = {name: pyarrow.list_(type_) for name, type_ in types.items()}
        if self._params.prompt_logprobs is not None:
            types["prompt_logprobs"] = places
        return types | {"num_input_tokens": number, "error": text}


def _overridden(params: SamplingParams, given: Any) -> SamplingParams:
    if not isinstance(given, Mapping):
        raise InvalidInputError("sampling_params", given, "must be a dict")
    found = {name: value for name, value in given.items() if value is not None}
    unknown = sorted(set(found) - _SAMPLING_FIELDS)
    if unknown:
        limit = f"is unknown; the fields are {', '.join(sorted(_SAMPLING_FIELDS))}"
        raise InvalidInputError("sampling_params", unknown[0], limit)
    return replace(params, **found)


def _answer_columns(answer: CompletionOutput) -> _Row:
    return {
        "generated_text": answer.text,
        "generated_tokens": list(answer.token_ids),
        "finish_reason": answer.finish_reason,
        "num_generated_tokens": len(answer.token_ids),
        "cumulative_logprob": answer.cumulative_logprob,
        "logprobs": None if answer.logprobs is None else plain_logprobs(answer.logprobs),
    }


def _rows_of_columns(columns: Mapping[str, Any]) -> list[_Row]:
    plain = {name: [_plain(value) for value in column] for name, column in columns.items()}
    return [dict(zip(plain, values, strict=True)) for values in zip(*plain.values(), strict=True)]


def _plain(value: Any) -> Any:
    """A value without NumPy types: a column with nulls has floats in place of integers."""
    if hasattr(value, "tolist"):  # an array or a NumPy scalar
        value = value.tolist()
    if isinstance(value, dict):
        return {name: _plain(item) for name, item in value.items()}
    if isinstance(value, list):
        return [_plain(item) for item in value]
    if isinstance(value, float):
        if math.isnan(value):
            return None
        return int(value) if value.is_integer() and abs(value) < _EXACT_FLOAT else value
    return value
