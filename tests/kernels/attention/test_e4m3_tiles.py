"""Attention over e4m3 caches on the CPU, under Triton's interpreter, at small shapes.

Results are compared with float64 on the cached values, and bit against bit, as in test_decode.py.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor

from pagespec.kernels import e4m3
from pagespec.kernels.arguments import RopeInputs
from pagespec.kernels.attention import e4m3_tiles, launch, reference
from pagespec.kernels.fused import dispatch, kv_store, norm_rope_store
from tests.kernels.attention.test_decode import (
    ROWS,
    SMALL,
    SPREADS,
    attend,
    shuffled,
    stored,
)
from tests.support.apart import by_day_and_night, run_apart
from tests.support.paged import Shape, bundled, float64_attention, make_batch, rescheduled

pytestmark = pytest.mark.usefixtures("poisoned", "ordered_dot")

SHAPES = [
    Shape(is_e4m3=True),
    Shape(hq=6, hkv=2, dk=96, dv=96, window=7, softcap=3.0, has_sinks=True, is_e4m3=True),
    Shape(hq=5, hkv=1, dk=24, dv=32, block_size=32, softcap=2.0, is_e4m3=True),
    Shape(hq=2, hkv=2, dk=64, dv=64, window=40, has_sinks=True, is_e4m3=True, dtype=torch.bfloat16),
    Shape(dk=16, dv=8, block_size=32, window=1, dtype=torch.float16, is_e4m3=True),
]
ONE_HEAD = [
    Shape(hq=2, hkv=1, is_e4m3=True, dtype=torch.bfloat16),
    Shape(hq=3, hkv=1, dk=32, dv=32, window=7, softcap=3.0, has_sinks=True, is_e4m3=True),
]
TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}


@triton.jit
def _halves(pairs):  # type: ignore[no-untyped-def]
    even = (pairs & 255).to(tl.uint8).to(tl.float8e4nv, bitcast=True)
    odd = (pairs >> 8).to(tl.uint8).to(tl.float8e4nv, bitcast=True)
    return even.to(tl.float16), odd.to(tl.float16)


@pytest.fixture(autouse=True)
def _without_assembly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(e4m3_tiles, "halves_of_pairs", _halves)


@pytest.mark.parametrize("rows", ROWS.values(), ids=ROWS.keys())
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_matches_float64(shape: Shape, rows: list[tuple[int, int]]) -> None:
    for block_n, num_padding in ((16, 3), (32, 0)):
        batch = stored(rows, shape, num_padding=num_padding)
        out = attend(batch.attend, block_n=block_n, near_split=32)
        error = (out[: batch.num_tokens].double() - float64_attention(batch, rows, shape)).abs()
        assert error.max().item() <= TOLERANCE[shape.dtype]  # false for NaN
        assert (out[batch.num_tokens :] == 0).all()
        plain = reference.paged_attention(*bundled(*batch.attend))
        assert (plain - out).abs().max() <= TOLERANCE[shape.dtype]


@pytest.mark.parametrize("shape", ONE_HEAD, ids=str)
def test_spreading_segments_over_programs_changes_no_bit(shape: Shape) -> None:
    for rows in ([(10, 1), (90, 1)], [(3, 2), (64, 1)]):
        batch = stored(rows, shape)
        outputs = {name: attend(batch.attend, **spread) for name, spread in SPREADS.items()}
        with shuffled(0):
            outputs["another order"] = attend(batch.attend)
        first = outputs["one program a context"]
        for name, out in outputs.items():
            assert torch.equal(out, first), name


@pytest.mark.parametrize("shape", ONE_HEAD, ids=str)
def test_schedules_give_the_same_bits(shape: Shape) -> None:
    """One prefill; several chunks at once; decodes at once and alone."""
    length = 75
    batch = stored([(0, length)], shape, num_padding=0)
    whole = attend(batch.attend)
    chunks = [(0, 1), (1, 8), (8, 40), (40, 41), (41, length)]
    assert torch.equal(attend(rescheduled(batch, chunks)), whole)
    decodes = [(p, p + 1) for p in (0, 15, 16, 63, 64, 74)]
    tokens = [begin for begin, _ in decodes]
    assert torch.equal(attend(rescheduled(batch, decodes)), whole[tokens])
    for alone in ((64, 65), (70, 75)):
        assert torch.equal(attend(rescheduled(batch, [alone])), whole[slice(*alone)])


@pytest.mark.parametrize("size", [1e-20, 1e-8, 1.0, 1e4, 1e20])
def test_numbers_of_any_size(size: float) -> None:
    """Queries, keys and values far outside float16's range, of one magnitude or of many."""
    shape = Shape(hq=2, hkv=1, dk=32, dv=32, is_e4m3=True, dtype=torch.bfloat16)
    rows = [(40, 1), (0, 30)]
    batch = make_batch(rows, shape, num_padding=0)
    key, value, k_cache, v_cache, slots = batch.store
    sizes = (
        torch.ones(len(key), 1, 1) if size == 1 else torch.logspace(0, -5, len(key))[:, None, None]
    )
    value = (value * sizes * size).to(value.dtype)
    k_cache.view(torch.uint8)[:] = 0
    v_cache.view(torch.uint8)[:] = 0
    batch.attend[0].mul_(1 / size)
    kv_store.kv_store((key * size).to(key.dtype), value, k_cache, v_cache, slots)
    out = attend(batch.attend).float()
    expected = reference.paged_attention(*bundled(*batch.attend)).float()
    assert bool(((out - expected).abs() <= 1e-2 * expected.abs().amax(-1, keepdim=True)).all())


def bytes_of(caches: tuple[Tensor, Tensor]) -> list[Tensor]:
    return [cache[:-1].view(torch.uint8) for cache in caches]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_the_stores_write_the_bytes_of_the_reference(dtype: torch.dtype) -> None:
    for hkv, dk, dv, page in ((2, 64, 48, 16), (3, 128, 128, 32), (1, 24, 40, 16)):
        shape = Shape(hq=2 * hkv, hkv=hkv, dk=dk, dv=dv, block_size=page, is_e4m3=True, dtype=dtype)
        batch = make_batch([(3, 4), (0, 7), (15, 1)], shape)
        key, value, *caches, slots = batch.store
        key[2, 0] = 0
        key[3] *= 1e-4
        value[1, 0, 1:] = 0
        ours, theirs = ([cache.clone() for cache in caches] for _ in range(2))
        kv_store.kv_store(key, value, *ours, slots)
        dispatch.kv_store(key, value, *theirs, slots)
        assert all(map(torch.equal, bytes_of(ours), bytes_of(theirs)))
        held = e4m3.load_planes(ours[0], slots[: batch.num_tokens])
        assert torch.equal(held, e4m3.decode_rows(e4m3.encode_rows(key[: batch.num_tokens])))


@pytest.mark.parametrize("has_norm", [True, pytest.param(False, marks=pytest.mark.nightly)])
def test_one_launch_is_two(has_norm: bool) -> None:
    """Norm, rotation and store within decode: outputs and bytes of the separate kernels."""
    shape = Shape(hq=4, hkv=2, is_e4m3=True, dtype=torch.float16)
    for rows in ([(10, 1), (90, 1), (0, 1)], [(15, 2), (64, 1), (0, 0)]):
        batch = make_batch(rows, shape, num_padding=0)
        query, k_cache, v_cache, *rest = batch.attend
        key, value, *_, slots = batch.store
        angles = torch.randn(1, len(query), 64)
        weights = [torch.randn(64).half() if has_norm else None for _ in "qk"]
        inputs = RopeInputs(
            query, key, value, angles.cos().half(), angles.sin().half(), 64, *weights, 1e-6,
            "rounded",
        )  # fmt: skip
        ours, theirs = ([cache.clone() for cache in (k_cache, v_cache)] for _ in range(2))
        rotated = norm_rope_store.norm_rope_store(inputs, *theirs, slots)
        expected = attend((rotated, *theirs, *rest))
        for spread in SPREADS.values():
            _, kv, params = bundled(query, *ours, *rest)
            out = launch.fused_rope_attention(
                inputs, slots, kv, params, tiling=replace(SMALL, **spread)
            )
            assert torch.equal(out, expected)
            assert all(map(torch.equal, bytes_of(ours), bytes_of(theirs)))


def test_planes_are_views_of_the_blocks() -> None:
    cache: Any = torch.zeros(3, 16, 2, 20, dtype=torch.uint8).view(torch.float8_e4m3fn)
    vectors, scales = e4m3.planes_of(cache)
    assert vectors.shape == (3, 2, 16, 16)
    assert scales.shape == (3, 2, 16)
    vectors.fill_(1)
    assert np.count_nonzero(cache.view(torch.uint8).numpy()) == 3 * 16 * 2 * 16
    scales.copy_(torch.full_like(scales, 2.0))
    assert cache.view(torch.uint8).view(3, -1)[:, -4:].tolist() == [[0, 0, 0, 64]] * 3


COMPILED = [
    {"hq": 16, "hkv": 8, "dim": 128, "page": 16, "window": False, "softcap": False},
    {"hq": 32, "hkv": 8, "dim": 64, "page": 64, "window": True, "softcap": True},
]


@pytest.mark.parametrize("cases", by_day_and_night(COMPILED, 0))
def test_compiled_for_hopper(cases: list[dict[str, Any]]) -> None:
    """Contraction changes no instruction, so decode that fuses RoPE, which is compiled without, has
    the bits of the others; it adds up the squares of a norm in the order of the kernel of their
    own; loads are asynchronous; and no byte of a value is loaded by itself."""
    program = Path(__file__).with_name("compile_e4m3.py")
    printed = run_apart(str(program), json.dumps(cases))
    for case, built in zip(cases, json.loads(printed.splitlines()[-1]), strict=True):
        for name in ("contracted", "contracted_prefill"):
            with_contraction, without = built[name]
            assert with_contraction == without > 0, (case, name)
        assert all(order == [[8, case["dim"] // 8, 1]] for order in built["squares"]), case
        assert not any(built["bytes_alone"]), case
        assert all(built["copies"]), case
        assert all(built["conversions"]), case
        # Bytes a thread, outside of the loop over tiles.
        assert max(built["spilled"]) <= 96, case
