"""The fields of a step: one declared list, from which graphs, packing, buffers and ranks follow.

A field that is an input of the graph is traced with it (:mod:`.step_inputs`), and is part of the
keys of stored graphs and start records. :mod:`..runner.layout` defines how fields are stored in the
sent words.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal, get_args

import numpy as np
import torch

TORCH_DTYPES: Final[dict[type, torch.dtype]] = {
    np.int32: torch.int32,
    np.int64: torch.int64,
    np.float32: torch.float32,
}
TABLES: Final = ("block_tables", "state_tables")
"""Inputs of the graph that are not fields: tables, of which only changes are sent."""

Per = Literal["token", "row", "bound", "sample", "step"]
Counts = dict[Per, int]


def counts_of(num_tokens: int, num_rows: int, num_samples: int) -> Counts:
    """The number of entries of a field, by its ``per``."""
    return {
        "token": num_tokens,
        "row": num_rows,
        "bound": num_rows + 1,
        "sample": num_samples,
        "step": 1,
    }


LAST: Final = "last"
"""Padding that repeats the last value, 0 if there is none."""


Form = Literal["decode", "mixed", "long", "host"]
"""The forms of a step: on a GPU with only decode rows, or with any rows; with any rows and few
samples, without hidden states (:mod:`.passes.hoist_keep_rows`); on a CPU."""
FORMS: Final[tuple[Form, ...]] = get_args(Form)
MIXED: Final[tuple[Form, ...]] = ("mixed", "long")
GPU: Final[tuple[Form, ...]] = ("decode", *MIXED)
MIXED_HOST: Final[tuple[Form, ...]] = (*MIXED, "host")


Source = Callable[[Any], Any]
"""A function of a plan's arrays, :class:`.runner.layout.PlanArrays`."""


@dataclass(frozen=True, slots=True)
class Field:
    """A field of a step.

    Attributes:
        name: distinct within a form.
        per: one entry per token, row, ...; "bound" has one more than the number of rows.
        source: its entries without padding, ``[n]`` or ``[width, n]``, or one value for all. None
            for a field that is derived from others.
        dtype: of an entry. A 64-bit entry takes two words; a float is sent as its bits.
        padding: value of the entries after those of the plan, or :data:`LAST`.
        forms: the forms of a step that have the field.
        is_input: whether it is an input of the graph: as the attribute of its name in
            :class:`.StepInputs`, or in ``more``.
        width: number of arrays of entries; above 1, the tensor is ``[width, n]``.
        is_empty: a derived field without entries: its tensor is ``[0]`` in steps of these forms.
    """

    name: str
    per: Per
    source: Source | None = None
    dtype: type = np.int32
    padding: float | Literal["last"] = 0
    forms: tuple[Form, ...] = FORMS
    is_input: bool = False
    width: int = 1
    is_empty: bool = False

    @property
    def is_plain(self) -> bool:
        """Whether each entry is one word, and the words are stored in the order of the tensor."""
        return self.dtype is np.int32 and self.width == 1

    @property
    def shape_key(self) -> tuple[Per, str, int]:
        """``per``, dtype and width, on which a graph depends."""
        return self.per, np.dtype(self.dtype).name, self.width

    def shape(self, num_entries: int) -> tuple[int, ...]:
        """Shape of the tensor with that many entries."""
        if self.is_empty:
            return (0,)
        return (num_entries,) if self.width == 1 else (self.width, num_entries)

    def num_bytes(self, counts: Counts) -> int:
        """Bytes of its entries in a step of these sizes."""
        num_entries = 0 if self.is_empty else self.width * counts[self.per]
        return num_entries * np.dtype(self.dtype).itemsize


FIELDS: Final = (
    Field("token_ids", "token", lambda step: step.token_ids),
    Field("positions", "token", lambda step: step.positions),
    # The row of the table store for each token, and for each row. Padding reads row 0.
    Field(
        "token_rows",
        "token",
        lambda step: step.table_rows[step.rows.token_rows],
        padding=-1,
        forms=MIXED,
    ),
    Field("table_rows", "row", lambda step: step.table_rows, is_input=True),
    Field("new_blocks", "row", lambda step: step.new_blocks, padding=-1, forms=("decode",)),
    Field(
        "query_starts",
        "bound",
        lambda step: step.rows.query_starts,
        padding=LAST,
        forms=MIXED_HOST,
        is_input=True,
    ),
    Field(
        "context_lens",
        "row",
        lambda step: step.starts + step.rows.lengths,
        forms=MIXED_HOST,
        is_input=True,
    ),
    Field(
        "logits_to_keep",
        "sample",
        lambda step: step.rows.kept,
        dtype=np.int64,
        padding=LAST,
        forms=MIXED_HOST,
        is_input=True,
    ),
    Field("seeds", "sample", lambda step: step.params.seeds, dtype=np.int64, forms=GPU),
    Field(
        "temperatures", "sample", lambda step: step.params.temperatures, dtype=np.float32, forms=GPU
    ),
    Field("num_padding_rows", "step", lambda step: step.num_padding_rows, forms=("decode",)),
    Field("result_row", "step", lambda step: step.result_row, forms=GPU),
    # Derived fields.
    Field("input_ids", "token", dtype=np.int64, is_input=True),
    Field("position_ids", "token", dtype=np.int64, is_input=True),
    Field("slot_mapping", "token", dtype=np.int64, is_input=True),
    Field("query_starts", "bound", forms=("decode",), is_input=True),
    Field("context_lens", "row", forms=("decode",), is_input=True),
    Field("logits_to_keep", "sample", dtype=np.int64, forms=("decode",), is_input=True),
)

NUM_DRAFTS: Final = (
    # Draft tokens at the end of each row. Decode steps on a GPU have none.
    Field("num_drafts", "row", lambda step: step.num_drafts, forms=MIXED_HOST, is_input=True),
    Field("num_drafts", "row", forms=("decode",), is_input=True, is_empty=True),
)
"""Fields for models with recurrent layers, if rows may have draft tokens."""


def step_fields(*, has_drafts: bool, is_recurrent: bool) -> tuple[Field, ...]:
    """The fields of the steps of an engine.

    Args:
        has_drafts: whether rows may have draft tokens.
        is_recurrent: whether the model has recurrent layers; True if that is not known yet.
    """
    return (*FIELDS, *NUM_DRAFTS) if has_drafts and is_recurrent else FIELDS


def graph_inputs(fields: Sequence[Field]) -> tuple[Field, ...]:
    """The inputs of the graph, each once, without tables.

    Raises:
        ValueError: an input has the name of a table, is missing in some form, or differs between
            forms: one graph takes the steps of every form.
    """
    found: dict[str, Field] = {}
    for field in fields:
        if not field.is_input:
            continue
        if field.name in TABLES:
            raise ValueError(f"field {field.name}: an input of this name is a table")
        known = found.setdefault(field.name, field)
        if known.shape_key != field.shape_key:
            raise ValueError(f"field {field.name} is declared with two shapes or dtypes")
    for name in found:
        forms = {form for field in fields if field.name == name for form in field.forms}
        for form in FORMS:
            if form not in forms:
                raise ValueError(f"field {name} is an input of the graph, and not in form {form}")
    return tuple(found.values())


def input_keys(fields: Sequence[Field]) -> list[list[Any]]:
    """The properties of the fields that a traced graph depends on, as plain data."""
    return [[field.name, *field.shape_key] for field in graph_inputs(fields)]
