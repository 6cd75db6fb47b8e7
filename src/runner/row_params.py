"""Sampling parameters of the sampled rows of a step, in the form they are sent to a GPU."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ..engine.request import RequestInfo
from ..engine.sampling_params import SamplingParams
from .logprob_fields import sampled_fields
from .pinned_ring import IntArray

_MAX_INT32 = 2**31 - 1


@dataclass(frozen=True, slots=True)
class RowParams:
    """Sampling parameters of the sampled rows of a plan, in the form they are sent.

    Attributes:
        seeds: uint32 words as int32, ``[2, S]``, low words first. temperature_bits: int32 ``[S]``.
        truncated: int32 ``[4, n]``, of the n rows that use top_k, top_p or min_p: what
            ``TRUNCATED_FIELDS`` in :mod:`.top_k_top_p` lists.
        logprobs: what :func:`.sampled_fields` makes of them, flat.
    """

    seeds: IntArray
    temperature_bits: IntArray
    truncated: IntArray
    logprobs: IntArray

    @classmethod
    def of(cls, requests: Sequence[RequestInfo]) -> RowParams:
        params = [request.sampling_params for request in requests]
        seeds = np.array([request.seed & (1 << 64) - 1 for request in requests], np.uint64)
        return cls(
            np.stack([seeds & 0xFFFFFFFF, seeds >> 32]).astype(np.uint32).view(np.int32),
            np.array([p.temperature for p in params], np.float32).view(np.int32),
            truncated_fields([_params_in_step(request) for request in requests]),
            sampled_fields(requests).reshape(-1),
        )


def _params_in_step(request: RequestInfo) -> SamplingParams | None:
    """None of a row that is always edited, or has a mask, and is sampled behind its step."""
    params, edits = request.sampling_params, request.edits
    is_lasting = edits is not None and edits.is_lasting
    return None if is_lasting or params.structured_outputs is not None else params


def truncated_fields(params: Sequence[SamplingParams | None]) -> IntArray:
    """What :attr:`RowParams.truncated` says, of rows with these parameters; None: not here."""
    rows = [
        (place, p)
        for place, p in enumerate(params)
        if p is not None and p.temperature > 0 and (p.top_k > 0 or p.top_p < 1 or p.min_p > 0)
    ]
    top_p = np.array([p.top_p for _, p in rows], np.float32)
    min_p_distance = np.array([_min_p_distance(p.min_p) for _, p in rows], np.float32)
    return np.stack(
        [
            np.array([place for place, _ in rows], np.int32),
            np.array([min(p.top_k, _MAX_INT32) for _, p in rows], np.int32),
            top_p.view(np.int32),
            min_p_distance.view(np.int32),
        ]
    )


def _min_p_distance(min_p: float) -> float:
    """-log of the float32 ``min_p``, infinite at 0. One by one: the bits of a logarithm of an
    array may depend on the place in it."""
    rounded = float(np.float32(min_p)) if min_p else 0.0
    return -math.log(rounded) if rounded > 0 else math.inf
