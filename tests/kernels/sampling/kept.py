"""Rows of sampling parameters, and the tokens that the truncated-sampling kernel keeps for them.

The kernel of this module shares all code but the noise with :func:`sample_truncated`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from pagespec.engine.sampling_params import SamplingParams
from pagespec.kernels.sampling.sampler import SamplingInputs, _keep_top
from pagespec.kernels.sampling.top_k_top_p import TRUNCATED_FIELDS, sample_truncated
from pagespec.kernels.sampling.top_k_top_p_threshold import (
    find_threshold,
    keep_mask,
    largest_logit,
    token_keys,
)
from pagespec.runner.row_params import truncated_fields


@dataclass(frozen=True)
class Row:
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 1
    position: int = 1


def reference_inputs(rows: list[Row], device: str = "cpu") -> SamplingInputs:
    """For :func:`pagespec.kernels.sampling.sampler.sample`."""
    return SamplingInputs.from_lists(
        temperature=[row.temperature for row in rows],
        top_k=[row.top_k for row in rows],
        top_p=[row.top_p for row in rows],
        min_p=[row.min_p for row in rows],
        seeds=[row.seed for row in rows],
        positions=[row.position for row in rows],
        device=device,
    )


def staged(rows: list[Row]) -> Tensor:
    """The fields of those rows that truncate, int32 ``[TRUNCATED_FIELDS, n]``, as staged."""
    params = [
        SamplingParams(
            temperature=row.temperature, top_k=row.top_k, top_p=row.top_p, min_p=row.min_p
        )
        for row in rows
    ]
    return torch.from_numpy(truncated_fields(params))


def reference_kept(logits: Tensor, p: SamplingInputs) -> Tensor:
    """bool ``[S, V]``: the tokens that ``sample`` keeps, by its own steps."""
    scaled = logits.float()
    scaled = scaled - scaled.amax(-1, keepdim=True)
    scaled = scaled / p.temperature.unsqueeze(1)
    scaled = scaled.masked_fill(scaled < p.min_p.log().unsqueeze(1), float("-inf"))
    return _keep_top(scaled, p.top_k, p.top_p) > float("-inf")


@triton.jit
def _kept_kernel(  # type: ignore[no-untyped-def]
    logits, fields, temperatures, mask, num_rows, VOCAB: tl.constexpr, TILE: tl.constexpr
):
    row = tl.program_id(0)
    place = tl.load(fields + row)
    temperature = tl.load(temperatures + place)
    base = logits + place.to(tl.int64) * VOCAB
    top = largest_logit(base, None, VOCAB, TILE)
    limit, num_at_threshold, is_tied = find_threshold(
        base, None, top, temperature, fields + num_rows, row, num_rows, VOCAB, VOCAB, TILE
    )
    num_seen = limit * 0
    for first in range(0, VOCAB, TILE):
        ids = first + tl.arange(0, TILE)
        key = token_keys(base, None, first, top, temperature, VOCAB, TILE)
        is_kept, num_seen = keep_mask(key, limit, num_at_threshold, is_tied, num_seen)
        tl.store(mask + row.to(tl.int64) * VOCAB + ids, is_kept.to(tl.int8), mask=ids < VOCAB)


def kept(logits: Tensor, rows: list[Row], *, tile: int = 1024, num_warps: int = 4) -> Tensor:
    """bool ``[n, V]``: the tokens that the kernel keeps in rows that truncate; logits are
    contiguous."""
    fields = staged(rows).to(logits.device)
    num_rows, vocab_size = fields.shape[1], logits.shape[1]
    mask = torch.zeros(num_rows, vocab_size, dtype=torch.int8, device=logits.device)
    temperatures = torch.tensor([row.temperature for row in rows], device=logits.device)
    _kept_kernel[(num_rows,)](
        logits,
        fields,
        temperatures,
        mask,
        num_rows,
        VOCAB=vocab_size,
        TILE=tile,
        num_warps=num_warps,
    )
    return mask.bool()


def draw(logits: Tensor, rows: list[Row], *, only: list[int] | None = None, **how: int) -> Tensor:
    """Tokens of the rows that truncate (or of those whose places are in ``only``), -7 of others;
    int64 ``[S]``."""
    fields = staged(rows)
    if only is not None:
        fields = fields[:, [int(place) in only for place in fields[0]]]
    p = reference_inputs(rows, str(logits.device))
    sampled = torch.full((len(rows) + 1,), -7, device=logits.device)
    flat = fields.reshape(-1).to(logits.device)
    assert len(flat) % TRUNCATED_FIELDS == 0
    sample_truncated(logits, flat, p.temperature, p.seeds, p.positions, sampled, **how)
    assert sampled[-1] == -7
    return sampled[:-1]
