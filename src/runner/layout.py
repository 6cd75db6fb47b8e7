"""The step layout: how the fields of a step (:mod:`.step_fields`) lie in its int32 words.

The host packs the fields of a plan one behind the other, padded to the sizes of the step. Device
code reads them where they lie, as views whose addresses depend on the sizes alone, so that CUDA
graphs can hold them. A field without a source is derived from others: by the kernels in
:mod:`.unpack_kernels`, or by :mod:`.cpu_pack`.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any, Final, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..compile.step_fields import (
    FIELDS,
    FORMS,
    GPU,
    LAST,
    TORCH_DTYPES,
    Counts,
    Field,
    Form,
    Per,
    Source,
    counts_of,
    graph_inputs,
)
from ..engine.plan import StepPlan
from .pinned_ring import IntArray
from .row_params import RowParams
from .step_shapes import StepShape

_NONE = np.empty(0, np.int32)
_ALIGNMENT = 4  # words: 16 bytes, which Triton specializes kernels on


class Sizes(NamedTuple):
    """The form of a step, and the sizes it is padded to."""

    form: Form
    num_tokens: int
    num_rows: int
    num_samples: int

    @classmethod
    def of(cls, shape: StepShape) -> Sizes:
        """Those of a step on a GPU, which has room for one sample per row."""
        form: Form = "decode" if shape.is_decode else "mixed"
        return cls(form, shape.num_tokens, shape.num_rows, shape.num_rows)

    @property
    def counts(self) -> Counts:
        """Entries of a field, by what it has them per."""
        return counts_of(self.num_tokens, self.num_rows, self.num_samples)


class PlanArrays:
    """What the sources of fields read: a plan, and arrays computed from it at their first use.

    Args:
        params: sampling parameters of the sampled rows.
        table_rows: int32 ``[rows]``, the row of the table store of each row.
        new_blocks: int32 ``[rows]`` of a decode step: the block that each row grew by, or -1; one
            -1 if none grew.
        result_row: where the tokens of the step are to go on the host.
        num_padding_rows: rows that the step is padded with.

    Attributes:
        lengths, starts: int32 ``[rows]``. counts: as of :attr:`Sizes.counts`, without padding.
    """

    params: RowParams

    def __init__(
        self,
        plan: StepPlan,
        *,
        table_rows: IntArray = _NONE,
        new_blocks: IntArray | int = -1,
        result_row: int = 0,
        num_padding_rows: int = 0,
    ) -> None:
        self.plan, self.table_rows, self.new_blocks = plan, table_rows, new_blocks
        self.result_row, self.num_padding_rows = result_row, num_padding_rows
        num_rows = len(plan.requests)
        num_sampled = num_rows if plan.is_decode_only else plan.num_sampled
        self.counts = counts_of(len(plan.token_ids), num_rows, num_sampled)

    @cached_property
    def lengths(self) -> IntArray:
        return np.array(self.plan.num_tokens, np.int32)

    @cached_property
    def starts(self) -> IntArray:
        return np.array(self.plan.starts, np.int32)

    @property
    def token_ids(self) -> Sequence[int] | IntArray:
        ids = self.plan.token_ids
        if isinstance(ids, range):  # an array is quicker to copy
            return np.arange(ids.start, ids.stop, ids.step, dtype=np.int32)
        return ids

    @property
    def positions(self) -> Sequence[int] | NDArray[Any]:
        if self.plan.is_decode_only:
            return self.plan.starts
        lengths, first = self.lengths, self.query_starts[:-1]
        return np.arange(self.plan.total_num_tokens) - np.repeat(first - self.starts, lengths)

    @cached_property
    def query_starts(self) -> IntArray:
        """int32 ``[rows + 1]``: the first token of each row, then the number of tokens."""
        found = np.zeros(len(self.plan) + 1, np.int32)
        np.cumsum(self.lengths, out=found[1:])
        return found

    @cached_property
    def num_samples(self) -> IntArray:
        return np.array(self.plan.num_samples, np.int32)

    @cached_property
    def sampled_rows(self) -> NDArray[np.intp]:
        """The row of each sample."""
        return np.repeat(np.arange(len(self.plan)), self.num_samples)

    @property
    def logits_to_keep(self) -> NDArray[Any]:
        """The token that each sample follows: the last ones of its row."""
        rows = self.sampled_rows
        last = self.query_starts[1:][rows] - 1
        if len(rows) == np.count_nonzero(self.num_samples):
            return last  # one sample per row
        return last - (np.cumsum(self.num_samples)[rows] - 1 - np.arange(len(rows)))


class Place(NamedTuple):
    """Where a field lies: words ``[begin, end)``, as ``num_entries`` of each of its
    arrays. ``dtype`` is None of plain words, which need no view."""

    field: Field
    source: Source
    per: Per
    begin: int
    end: int
    num_entries: int
    dtype: type | None


class Layout:
    """A list of fields, and what follows from it.

    Raises:
        ValueError: two fields of a form have one name, or as of :func:`.graph_inputs`.
    """

    def __init__(self, fields: Sequence[Field]) -> None:
        for form in FORMS:
            names = [field.name for field in fields if form in field.forms]
            if len(set(names)) < len(names):
                raise ValueError(f"fields of one name in form {form}: {names}")
        graph_inputs(fields)
        self._fields = tuple(fields)
        self._places = functools.lru_cache(maxsize=256)(self._lay_out)

    def _lay_out(self, sizes: Sizes) -> tuple[tuple[Place, ...], int, Counts]:
        counts, places, at = sizes.counts, [], 0
        for field in self._fields:
            if field.source is None or sizes.form not in field.forms:
                continue
            count = counts[field.per]
            end = at + field.num_bytes(counts) // 4
            is_plain = field.dtype is np.int32 and field.width == 1
            dtype = None if is_plain else field.dtype
            places.append(Place(field, field.source, field.per, at, end, count, dtype))
            at = -(-end // _ALIGNMENT) * _ALIGNMENT
        return tuple(places), at, counts

    def num_words(self, sizes: Sizes) -> int:
        """int32 words of the packed fields of a step."""
        return self._places(sizes)[1]

    def pack(self, step: PlanArrays, sizes: Sizes, array: IntArray) -> int:
        """Write the fields of a step, padded, into the first words of ``array``.

        Returns:
            How many words those are.

        Raises:
            ValueError: the step has more of something than the sizes have room for.
        """
        places, num_words, padded_counts = self._places(sizes)
        counts = step.counts
        is_padded = counts != padded_counts
        if is_padded:
            for per, room in padded_counts.items():
                if counts[per] > room:
                    raise ValueError(f"a step has {counts[per]} {per}s, and is packed for {room}")
            array[:num_words] = 0
        # This loop runs in front of every step, and each operation of numpy counts.
        for field, source, per, begin, end, num_entries, dtype in places:
            num = counts[per]
            if dtype is not None:
                target = _cut(array, begin, end, field)
                (target[..., :num] if is_padded else target)[:] = source(step)
            elif per == "step":
                array[begin] = source(step)
            else:
                array[begin : begin + num] = source(step)
            if is_padded and num < num_entries and field.padding:
                target = _cut(array, begin, end, field)
                if field.padding != LAST:
                    target[..., num:] = field.padding
                elif num:
                    target[..., num:] = target[..., num - 1 : num]
        return num_words

    def __reduce__(self) -> Any:
        """The layout of all steps by its name: sources of fields have none."""
        return "LAYOUT" if self is LAYOUT else super().__reduce__()

    def views(self, words: Tensor, sizes: Sizes) -> dict[str, Tensor]:
        """The packed fields of a step by name, where they lie in ``words``."""
        found = {}
        for field, _, _, begin, end, _, dtype in self._places(sizes)[0]:
            view = words[begin:end]
            if dtype is not None:
                view = view.view(TORCH_DTYPES[field.dtype])
            found[field.name] = view if field.width == 1 else view.view(field.width, -1)
        return found

    def allocate(self, sizes: Sizes, device: torch.device) -> dict[str, Tensor]:
        """Zeros for each derived field of a step on a GPU, by name."""
        counts = sizes.counts
        return {
            field.name: torch.zeros(
                field.shape(counts[field.per]), dtype=TORCH_DTYPES[field.dtype], device=device
            )
            for field in self._fields
            if field.source is None and set(field.forms) & set(GPU)
        }

    def inputs(
        self, packed: Mapping[str, Tensor], derived: Mapping[str, Tensor], sizes: Sizes
    ) -> dict[str, Tensor]:
        """The inputs of the graph by name, without tables.

        Args:
            packed: as :meth:`views` returns them. derived: at least as long as the sizes say.
        """
        counts = sizes.counts
        return {
            field.name: derived[field.name][..., : counts[field.per]]
            if field.source is None
            else packed[field.name]
            for field in self._fields
            if field.is_input and sizes.form in field.forms
        }

    def num_input_bytes(self, sizes: Sizes) -> int:
        """Of the inputs of the graph, without tables."""
        counts = sizes.counts
        inputs = (f for f in self._fields if f.is_input and sizes.form in f.forms)
        return sum(field.num_bytes(counts) for field in inputs)

    def input_names(self, form: Form) -> Iterator[str]:
        """Names of the inputs of a graph, without tables."""
        return (f.name for f in self._fields if f.is_input and form in f.forms)


def _cut(array: IntArray, begin: int, end: int, field: Field) -> NDArray[Any]:
    entries: NDArray[Any] = array[begin:end].view(field.dtype)
    return entries if field.width == 1 else entries.reshape(field.width, -1)


LAYOUT: Final = Layout(FIELDS)


def layout_of(fields: Sequence[Field]) -> Layout:
    """The layout of steps for a graph with these fields."""
    return LAYOUT if tuple(fields) == FIELDS else Layout(fields)
