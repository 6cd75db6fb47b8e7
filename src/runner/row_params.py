"""Sampling parameters of the sampled rows of a step, in the form in which they are sent to a
GPU."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from operator import attrgetter

import numpy as np
from numpy.typing import NDArray

from ..engine.request import RequestInfo
from ..engine.sampling_params import SamplingParams
from ..kernels.sampling.logprob_rows import LOGPROB_FIELDS
from ..params.declare import declared, defaults
from .logprob_rows import sampled_fields
from .pinned import IntArray

_MAX_INT32 = 2**31 - 1


@dataclass(frozen=True, slots=True)
class RowParams:
    """Sampling parameters of the sampled rows of a plan, as sent.

    Attributes:
        seeds: int64 ``[S]``. temperatures: float32 ``[S]``.
        truncated: int32 ``[TRUNCATED_FIELDS, n]``, for the n rows that use a parameter declared
            with the stage "cut": the place, then these parameters in the order of :data:`CUTS`, as
            sent.
        logprobs: the result of :func:`.sampled_fields`, flat.
    """

    seeds: NDArray[np.int64]
    temperatures: NDArray[np.float32]
    truncated: IntArray
    logprobs: IntArray

    @classmethod
    def of(cls, requests: Sequence[RequestInfo]) -> RowParams:
        params = [request.sampling_params for request in requests]
        seeds = np.array([request.seed & (1 << 64) - 1 for request in requests], np.uint64)
        return cls(
            seeds.view(np.int64),
            np.array([p.temperature for p in params], np.float32),
            truncated_fields([_params_in_step(request) for request in requests]),
            sampled_fields(requests).reshape(-1),
        )

    def of_samples(self, rows: NDArray[np.intp]) -> RowParams:
        """The parameters of samples, from those of all rows of a plan.

        Args:
            rows: the row of each sample, ascending.
        """
        num_rows = len(self.seeds)
        return RowParams(
            self.seeds[rows],
            self.temperatures[rows],
            _of_samples(self.truncated, rows, num_rows),
            _of_samples(self.logprobs.reshape(LOGPROB_FIELDS, -1), rows, num_rows).reshape(-1),
        )


def _of_samples(fields: IntArray, rows: NDArray[np.intp], num_rows: int) -> IntArray:
    """``[n, m]``: the fields of some rows, whose places come first, ascending, repeated for each
    sample of these rows. A row may have several fields of each kind, which stay together."""
    if not fields.size:
        return fields
    counts = np.bincount(fields[0], minlength=num_rows)
    num_own = counts[rows]
    places = np.repeat(np.arange(len(rows)), num_own)
    within = np.arange(len(places)) - np.repeat(np.cumsum(num_own) - num_own, num_own)
    found = fields[:, (np.cumsum(counts) - counts)[rows[places]] + within]
    found[0] = places
    return found


def _params_in_step(request: RequestInfo) -> SamplingParams | None:
    """None for a row that is always edited, or has a mask, and is sampled after its step."""
    params, edits = request.sampling_params, request.edits
    is_lasting = edits is not None and edits.is_lasting
    return None if is_lasting or params.structured_outputs is not None else params


def truncated_fields(params: Sequence[SamplingParams | None]) -> IntArray:
    """:attr:`RowParams.truncated` of rows with these parameters; None for rows without fields
    here."""
    rows: list[tuple[float, ...]] = []
    for place, p in enumerate(params):
        if p is None or p.temperature == 0 or _values(p) == _OFF:
            continue
        sent = _sent(_values(p))
        if sent != _SENT_OFF:
            rows.append((place, *sent))
    columns = list(zip(*rows, strict=True)) or [()] * (1 + len(_CUTS))
    return np.stack([_bits(c, k) for c, k in zip(columns, (int, *_KINDS), strict=True)])


def _sent(values: Sequence[float]) -> tuple[float, ...]:
    # One at a time: in an array, the bits of a logarithm may depend on the place of the element.
    cuts = zip(_CUTS.values(), values, strict=True)
    return tuple(value if cut.sent is None else cut.sent(value) for cut, value in cuts)


def _bits(values: Sequence[float], kind: type) -> IntArray:
    """Integers, or the bits of float32 values."""
    if kind is int:
        return np.array([min(value, _MAX_INT32) for value in values], np.int32)
    return np.array(values, np.float32).view(np.int32)


# The order in which kernels read them. The fields of SamplingParams have that of vLLM.
CUTS = ("top_k", "top_p", "min_p")
_CUTS = {name: declared(SamplingParams)[name] for name in CUTS}
_OFF = tuple(defaults(SamplingParams)[name] for name in _CUTS)
_KINDS = tuple(map(type, _OFF))
_SENT_OFF = _sent(_OFF)
_values = attrgetter(*_CUTS)
