"""The step layout: how the fields of a step (:mod:`..compile.step_fields`) are stored in its int32
words.

The host packs the fields of a plan one after the other, padded to the sizes of the step. Device
code reads them in place, as views whose addresses depend only on the sizes, so that CUDA graphs can
contain them. A field without a source is derived from others, by the kernels in
:mod:`.gpu.unpack_kernels` or by :mod:`.cpu.pack`.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
from itertools import compress
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
from ..engine.request import RequestInfo
from .pinned import ALIGNMENT, IntArray
from .row_params import RowParams

_NONE = np.empty(0, np.int32)
_LONG_TOKENS = 1024  # shorter steps mostly read weights, of the last layer as well
_TOKENS_PER_SAMPLE = 8


def has_few_samples(num_tokens: int, num_samples: int) -> bool:
    """Whether computing only the sampled tokens in the last layer saves most of that layer."""
    return num_samples * _TOKENS_PER_SAMPLE <= num_tokens


class StepShape(NamedTuple):
    """The padded sizes of a step, and its form. On a GPU these are the shapes of captured
    graphs."""

    num_tokens: int
    num_rows: int
    num_samples: int
    form: Form

    @classmethod
    def decode(cls, num_rows: int) -> StepShape:
        """On a GPU: every row computes one token and samples."""
        return cls(num_rows, num_rows, num_rows, "decode")

    @classmethod
    def mixed(cls, num_tokens: int, num_rows: int) -> StepShape:
        """On a GPU: any rows, and at most ``num_rows`` samples. A step whose rows have draft tokens
        has more samples than rows, and is padded with empty rows."""
        return cls(num_tokens, num_rows, num_rows, "mixed")

    @classmethod
    def verify(cls, num_tokens: int) -> StepShape:
        """On a GPU: a mixed step that may sample after each token. It has as many rows as tokens,
        most of them empty, so attention computes it like a decode step."""
        return cls.mixed(num_tokens, num_tokens)

    @property
    def is_decode(self) -> bool:
        return self.form == "decode"

    @property
    def is_long(self) -> bool:
        """Whether hidden states are not computed for all of its tokens."""
        return self.form == "long"

    def lengthened(self) -> StepShape:
        """The same sizes in the form "long", if that saves time."""
        has_many = self.num_tokens >= _LONG_TOKENS
        is_long = self.form == "mixed" and has_many and has_few_samples(*self[::2])
        return self._replace(form="long") if is_long else self

    @property
    def counts(self) -> Counts:
        """The number of entries of a field, by what it is stored per (token, row, sample, step)."""
        return counts_of(self.num_tokens, self.num_rows, self.num_samples)


class RowArrays(NamedTuple):
    """Arrays that follow from the numbers of tokens and samples of a plan's rows.

    Attributes:
        lengths: int32 ``[rows]``. query_starts: int32 ``[rows + 1]``: the first token of each row,
            then the number of tokens.
        sample_bounds: int32 ``[rows + 1]``: the first sample of each row, then their number.
        token_rows, offsets: the row of each token, and its place in the row.
        sampled_rows: the row of each sample. kept: the token after which each sample follows.
    """

    lengths: IntArray
    query_starts: IntArray
    sample_bounds: IntArray
    token_rows: NDArray[np.intp]
    offsets: NDArray[Any]
    sampled_rows: NDArray[np.intp]
    kept: NDArray[Any]

    @classmethod
    def of(cls, num_tokens: tuple[int, ...], num_samples: tuple[int, ...]) -> RowArrays:
        lengths, samples = np.array(num_tokens, np.int32), np.array(num_samples, np.int32)
        num_rows = len(lengths)
        query_starts, sample_bounds = np.zeros((2, num_rows + 1), np.int32)
        np.cumsum(lengths, out=query_starts[1:])
        np.cumsum(samples, out=sample_bounds[1:])
        token_rows = np.repeat(np.arange(num_rows), lengths)
        offsets = np.arange(len(token_rows), dtype=np.int32) - query_starts[token_rows]
        sampled_rows = np.repeat(np.arange(num_rows), samples)
        # The last tokens of the row.
        num_behind = sample_bounds[1:][sampled_rows] - 1 - np.arange(len(sampled_rows))
        kept = query_starts[1:][sampled_rows] - 1 - num_behind
        bounds = query_starts, sample_bounds
        return cls(lengths, *bounds, token_rows, offsets, sampled_rows, kept)


# Steps with draft tokens are small, and few shapes of rows follow each other.
_rows_with_drafts = functools.lru_cache(maxsize=64)(RowArrays.of)


class PlanArrays:
    """The input of the fields' sources: a plan, and arrays computed from it.

    Args:
        params: sampling parameters of the sampled rows.
        table_rows: int32 ``[rows]``, the row of the table store of each row.
        new_blocks: int32 ``[rows]`` for a decode step: the block by which each row grew, or -1; a
            single -1 if none grew.
        result_row: destination of the step's tokens on the host.
        num_padding_rows: number of padding rows of the step.

    Attributes:
        counts: see :attr:`StepShape.counts`, without padding.
        starts: int32 ``[rows]``. This and ``rows`` are computed when a source first reads them.
            Fields of the form "decode" read neither.
        rows: see :class:`RowArrays`.
    """

    params: RowParams
    starts: IntArray
    rows: RowArrays

    def __init__(
        self,
        plan: StepPlan,
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

    def _compute(self) -> None:
        plan = self.plan
        self.starts = np.array(plan.starts, np.int32)
        rows_of = _rows_with_drafts if plan.has_drafts else RowArrays.of
        self.rows = rows_of(plan.num_tokens, plan.num_samples)

    def __getattr__(self, name: str) -> Any:
        if name not in ("starts", "rows"):
            raise AttributeError(f"PlanArrays has no {name}")
        self._compute()
        return self.__dict__[name]

    @property
    def token_ids(self) -> Sequence[int] | IntArray:
        ids = self.plan.token_ids
        if isinstance(ids, range):  # an array is faster to copy
            return np.arange(ids.start, ids.stop, ids.step, dtype=np.int32)
        return ids

    @property
    def positions(self) -> Sequence[int] | NDArray[Any]:
        if self.plan.is_decode_only:
            return self.plan.starts
        return self.starts[self.rows.token_rows] + self.rows.offsets

    @property
    def sampled_requests(self) -> Sequence[RequestInfo]:
        """The request of each sample."""
        requests = self.plan.requests
        if not self.plan.has_drafts:
            return list(compress(requests, self.plan.num_samples))
        return [requests[row] for row in self.rows.sampled_rows]

    @property
    def num_drafts(self) -> IntArray | int:
        """The number of draft tokens of each row, its last tokens."""
        if not self.plan.has_drafts:
            return 0
        return np.maximum(np.array(self.plan.num_samples, np.int32) - 1, 0)


class Place(NamedTuple):
    """The place of a field: words ``[begin, end)``, with ``num_words`` per entry of each of its
    arrays. ``dtype`` is None for plain words, which need no view."""

    source: Source
    per: Per
    begin: int
    end: int
    num_words: int
    dtype: type | None
    field: Field


class Places(NamedTuple):
    """The places of the fields in a step of given sizes.

    Attributes:
        counts: from the sizes. num_words: of all fields.
        scalars: source and word of each plain field per step.
        arrays: all other fields. repeated: those of them that are padded with their last entry.
        all: the place of each field.
    """

    counts: Counts
    num_words: int
    scalars: tuple[tuple[Source, int], ...]
    arrays: tuple[Place, ...]
    repeated: tuple[Place, ...]
    all: tuple[Place, ...]


class Layout:
    """A list of fields, and everything derived from it.

    Raises:
        ValueError: two fields of a form have the same name, or see :func:`.graph_inputs`.
    """

    def __init__(self, fields: Sequence[Field]) -> None:
        for form in FORMS:
            names = [field.name for field in fields if form in field.forms]
            if len(set(names)) < len(names):
                raise ValueError(f"fields of one name in form {form}: {names}")
        graph_inputs(fields)
        self._fields = tuple(fields)
        self._inputs = {
            form: [field for field in fields if field.is_input and form in field.forms]
            for form in FORMS
        }
        self._packed = {
            form: [
                (field, field.source, field.per, *_words(field))
                for field in fields
                if field.source is not None and form in field.forms
            ]
            for form in FORMS
        }
        self._places = functools.lru_cache(maxsize=256)(self._lay_out)
        self._padding = functools.lru_cache(maxsize=64)(self._lay_out_padding)

    def _lay_out(self, shape: StepShape) -> Places:
        # Steps without a graph have new sizes all the time.
        counts, at = shape.counts, 0
        scalars, arrays, repeated, places = [], [], [], []
        for field, source, per, num_words, dtype in self._packed[shape.form]:
            end = at + field.width * num_words * counts[per]
            place = Place(source, per, at, end, num_words, dtype, field)
            places.append(place)
            if per == "step" and dtype is None:
                scalars.append((source, at))
            else:
                arrays.append(place)
                if field.padding == LAST:
                    repeated.append(place)
            at = -(-end // ALIGNMENT) * ALIGNMENT
        return Places(counts, at, tuple(scalars), tuple(arrays), tuple(repeated), tuple(places))

    def _lay_out_padding(self, shape: StepShape) -> IntArray:
        """The words of a step with only padding; 0 where the last entry is to be repeated."""
        places = self._places(shape)
        words = np.zeros(places.num_words, np.int32)
        for place in places.arrays:
            if place.field.padding != LAST:
                words[place.begin : place.end].view(place.field.dtype)[:] = place.field.padding
        return words

    def num_words(self, shape: StepShape) -> int:
        """int32 words of the packed fields of a step."""
        return self._places(shape).num_words

    def pack(self, step: PlanArrays, shape: StepShape, array: IntArray) -> int:
        """Write the fields of a step, padded, into the first words of ``array``.

        Returns:
            The number of words written.

        Raises:
            ValueError: the step has more of something than its sizes allow.
        """
        padded_counts, num_words, scalars, arrays, repeated = self._places(shape)[:5]
        counts = step.counts
        is_padded = counts != padded_counts
        if is_padded:
            for per, room in padded_counts.items():
                if counts[per] > room:
                    raise ValueError(f"a step has {counts[per]} {per}s, and is packed for {room}")
            array[:num_words] = self._padding(shape)
        # These loops run before every step, and each numpy operation costs time.
        for source, at in scalars:
            array[at] = source(step)
        for source, per, begin, end, entry_words, dtype, field in arrays:
            num = counts[per]
            if dtype is None:
                array[begin : begin + num] = source(step)
            elif field.width == 1:
                array[begin : begin + num * entry_words].view(dtype)[:] = source(step)
            else:
                array[begin:end].view(dtype).reshape(field.width, -1)[:, :num] = source(step)
        if is_padded:
            for _, per, begin, end, _, _, field in repeated:
                num = counts[per]
                if num and num < padded_counts[per]:
                    entries: NDArray[Any] = (
                        array[begin:end].view(field.dtype).reshape(field.width, -1)
                    )
                    entries[:, num:] = entries[:, num - 1 : num]
        return num_words

    def __reduce__(self) -> Any:
        """The layout of all steps is pickled by name, because the sources of fields cannot be
        pickled."""
        return "LAYOUT" if self is LAYOUT else super().__reduce__()

    def views(self, words: Tensor, shape: StepShape) -> dict[str, Tensor]:
        """The packed fields of a step by name, as views of ``words``."""
        found = {}
        for _, _, begin, end, _, dtype, field in self._places(shape).all:
            view = words[begin:end]
            if dtype is not None:
                view = view.view(TORCH_DTYPES[field.dtype])
            found[field.name] = view if field.width == 1 else view.view(field.width, -1)
        return found

    def allocate(self, shape: StepShape, device: torch.device) -> dict[str, Tensor]:
        """Zeros for each derived field of a step on a GPU, by name."""
        counts = shape.counts
        return {
            field.name: torch.zeros(
                field.shape(counts[field.per]), dtype=TORCH_DTYPES[field.dtype], device=device
            )
            for field in self._fields
            if field.source is None and set(field.forms) & set(GPU)
        }

    def inputs(
        self, packed: Mapping[str, Tensor], derived: Mapping[str, Tensor], shape: StepShape
    ) -> dict[str, Tensor]:
        """The inputs of the graph by name, without tables.

        Args:
            packed: from :meth:`views`. derived: at least as long as the sizes require.
        """
        counts, found = shape.counts, {}
        for field in self._inputs[shape.form]:
            if field.source is not None:
                found[field.name] = packed[field.name]
            else:
                num, whole = counts[field.per], derived[field.name]
                found[field.name] = whole[:num] if field.width == 1 else whole[:, :num]
        return found

    def num_input_bytes(self, shape: StepShape) -> int:
        """Bytes of the inputs of the graph, without tables."""
        counts = shape.counts
        return sum(field.num_bytes(counts) for field in self._inputs[shape.form])

    def input_names(self, form: Form) -> Iterator[str]:
        """Names of the inputs of a graph, without tables."""
        return (field.name for field in self._inputs[form])


def _words(field: Field) -> tuple[int, type | None]:
    """Words per entry, and the dtype of their view; None for plain words."""
    return np.dtype(field.dtype).itemsize // 4, None if field.is_plain else field.dtype


LAYOUT: Final = Layout(FIELDS)


def layout_of(fields: Sequence[Field]) -> Layout:
    """The layout of steps for a graph with these fields."""
    return LAYOUT if tuple(fields) == FIELDS else Layout(fields)
