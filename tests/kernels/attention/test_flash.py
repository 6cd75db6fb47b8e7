"""The FlashAttention adapters with fake library functions: arguments passed, results used.

Needs neither a library nor a GPU. The fakes compute: they gather pages as the real functions do,
with bottom-right causal masks, so a wrong argument gives a wrong result.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from itertools import pairwise
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from pagespec.kernels.attention import flash
from pagespec.kernels.attention.flash import Library
from pagespec.kernels.fused import dispatch as fused
from tests.support.paged import Rows, Shape, bundled, float64_attention, make_batch

MIXED: Rows = [(30, 9), (70, 1), (0, 5), (0, 0), (17, 1)]
DECODE: Rows = [(10, 1), (100, 1), (0, 1)]
ONE_TOKEN: Rows = [(0, 0), (33, 1), (0, 0)]


def dense(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    query_starts: list[int],
    contexts: list[int],
    tables: Tensor,
    scale: float,
    left: int | None,
    softcap: float,
    sinks: Tensor | None,
) -> Tensor:
    """Tokens of no row are left NaN, as an uninitialised output may be."""
    out = torch.full((*q.shape[:2], v.shape[3]), float("nan"), dtype=q.dtype)
    group = q.shape[1] // k.shape[2]
    for row, (begin, end) in enumerate(pairwise(query_starts)):
        positions = torch.arange(contexts[row])
        blocks = tables[row].long()[positions // k.shape[1]]
        keys = k[blocks, positions % k.shape[1]].repeat_interleave(group, 1).double()
        values = v[blocks, positions % k.shape[1]].repeat_interleave(group, 1).double()
        scores = torch.einsum("qhd,chd->qhc", q[begin:end].double(), keys) * scale
        if softcap:
            scores = softcap * torch.tanh(scores / softcap)
        own = torch.arange(contexts[row] - (end - begin), contexts[row])[:, None]
        seen = positions <= own
        if left is not None:
            seen &= positions >= own - left
        scores.masked_fill_(~seen[:, None], -torch.inf)
        if sinks is not None:
            sink = sinks.double()[None, :, None].expand(len(scores), -1, 1)
            scores = torch.cat([scores, sink], -1)
        weights = scores.softmax(-1)[..., : contexts[row]]
        out[begin:end] = torch.einsum("qhc,chd->qhd", weights, values).to(q.dtype)
    return out


def fake_4(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    cu_seqlens_q: Tensor,
    max_seqlen_q: int,
    seqused_k: Tensor,
    page_table: Tensor,
    softmax_scale: float,
    causal: bool,
    window_size: tuple[int | None, int | None],
    learnable_sink: Tensor | None,
    softcap: float,
) -> tuple[Tensor, None]:
    """Checks of flash-attn-4 4.0.0b36, ``interface.py``, and its window: keys from ``left`` before
    the query's own position, None for all."""
    assert causal
    assert page_table.dtype == seqused_k.dtype == cu_seqlens_q.dtype == torch.int32
    assert page_table.shape[0] == len(seqused_k) == len(cu_seqlens_q) - 1
    starts = cu_seqlens_q.tolist()
    assert max_seqlen_q >= max(end - begin for begin, end in pairwise(starts))
    left, right = window_size
    assert right is None or right == 0
    arguments = (starts, seqused_k.tolist(), page_table, softmax_scale, left, softcap)
    return dense(q, k, v, *arguments, learnable_sink), None


def fake_2(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    *,
    softmax_scale: float,
    causal: bool,
    window_size: tuple[int, int],
    softcap: float,
    block_table: Tensor,
) -> Tensor:
    """Checks of flash-attn 2.8, ``flash_api.cpp``; -1 is no window."""
    assert causal
    assert cu_seqlens_q.dtype == cu_seqlens_k.dtype == block_table.dtype == torch.int32
    assert cu_seqlens_q.shape == cu_seqlens_k.shape == (len(block_table) + 1,)
    # It then takes the queries for [rows, heads, size].
    assert max_seqlen_q > 1 or len(q) == len(block_table)
    starts = cu_seqlens_q.tolist()
    contexts = cu_seqlens_k.diff().tolist()
    assert max_seqlen_q >= max(end - begin for begin, end in pairwise(starts))
    assert max_seqlen_k >= max(contexts)
    left, right = window_size
    assert right == (-1 if left == -1 else 0)
    seen = None if left == -1 else left
    return dense(q, k, v, starts, contexts, block_table, softmax_scale, seen, softcap, None)


def install(monkeypatch: pytest.MonkeyPatch, **attributes: Any) -> None:
    """Install modules with the libraries' names, in place of installed ones."""
    package, cute = ModuleType("flash_attn"), ModuleType("flash_attn.cute")
    package.flash_attn_varlen_func = attributes["two"]  # type: ignore[attr-defined]
    cute.flash_attn_varlen_func = attributes["four"]  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "flash_attn", package)
    monkeypatch.setitem(sys.modules, "flash_attn.cute", cute)


@pytest.mark.parametrize("rows", [MIXED, DECODE, ONE_TOKEN], ids=["mixed", "decode", "one token"])
@pytest.mark.parametrize("library", flash.LIBRARIES)
def test_matches_float64(library: Library, rows: Rows, monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, two=fake_2, four=fake_4)
    attend = flash.attend_4 if library == "flash-attn-4" else flash.attend_2
    plain = Shape(dk=32, dv=32, block_size=16)
    shapes = [plain, replace(plain, window=1), replace(plain, window=7, softcap=3.0)]
    if library == "flash-attn-4":
        shapes.append(replace(plain, dv=16, has_sinks=True, softcap=2.0))
    for shape in shapes:
        for num_padding in (0, 3):
            batch = make_batch(rows, shape, num_padding=num_padding)
            fused.kv_store(*batch.store)
            out = attend(*bundled(*batch.attend))
            expected = float64_attention(batch, rows, shape)
            torch.testing.assert_close(
                out[: batch.num_tokens].double(), expected, rtol=1e-5, atol=1e-5
            )
            assert out.shape == (batch.num_tokens + num_padding, shape.hq, shape.dv)
            assert (out[batch.num_tokens :] == 0).all()


@pytest.mark.parametrize("attend", [flash.attend_2, flash.attend_4])
def test_takes_no_tokens(attend: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, two=fake_2, four=fake_4)
    query, kv, params = bundled(*make_batch([(0, 0)], Shape()).attend)
    out = attend(query[:0], kv, params)
    assert out.shape == (0, 4, 64)
