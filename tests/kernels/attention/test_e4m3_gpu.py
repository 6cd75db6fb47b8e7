"""Attention over e4m3 caches on a GPU: bytes, error bounds, and bit against bit.

The setting is that of test_decode_gpu.py.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from pagespec.kernels import e4m3, ops
from pagespec.kernels.arguments import RopeInputs
from pagespec.kernels.attention import launch, reference
from pagespec.kernels.attention.decode_prologue import fits
from pagespec.kernels.attention.tiling import choose_tiling
from pagespec.kernels.fused import dispatch, norm_rope_store
from pagespec.kernels.registry import registry
from pagespec.runner.block_copies import BlockCopier
from tests.kernels.attention.test_decode_gpu import (
    BF16,
    ROWS,
    attend,
    restricted,
    scheduled,
    stored,
)
from tests.support.paged import Shape, bundled, float64_attention, make_batch, rescheduled

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.usefixtures("poisoned"),
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability() < (8, 9),
        reason="no instruction converts e4m3",
    ),
]

SHAPES = [
    Shape(hq=16, hkv=8, dk=128, dv=128, dtype=BF16, is_e4m3=True),
    Shape(hq=9, hkv=3, dk=64, dv=64, block_size=32, has_sinks=True, window=128, dtype=BF16,
          is_e4m3=True),
    Shape(hq=8, hkv=4, dk=256, dv=256, softcap=50.0, block_size=128, dtype=BF16, is_e4m3=True),
    Shape(hq=32, hkv=8, dk=128, dv=128, block_size=64, dtype=torch.float16, is_e4m3=True),
    Shape(hq=8, hkv=8, dk=80, dv=96, window=513, softcap=5.0, block_size=64, dtype=BF16,
          is_e4m3=True),
    Shape(hq=8, hkv=2, dk=64, dv=64, is_e4m3=True),
    Shape(hq=24, hkv=2, dk=128, dv=128, dtype=BF16, is_e4m3=True),
]  # fmt: skip


# Weights are summed in bfloat16; see test_decode_gpu.py.
TOLERANCE = {torch.float32: 2e-5, BF16: 2.4e-2, torch.float16: 8e-3}


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_matches_float64(shape: Shape) -> None:
    for name, rows in ROWS.items():
        for num_padding in (0, 3):
            batch = stored(rows, shape, num_padding=num_padding)
            out = attend(batch)
            error = (out[: batch.num_tokens].double() - float64_attention(batch, rows, shape)).abs()
            assert error.max().item() <= TOLERANCE[shape.dtype], (name, num_padding)
            assert (out[batch.num_tokens :] == 0).all(), name
        plain = reference.paged_attention(*bundled(*batch.attend))
        assert (plain - out).abs().max() <= 2 * TOLERANCE[shape.dtype], name


@pytest.mark.parametrize("block_size", [16, 32, 64, 128, 256])
def test_block_sizes_give_the_same_bits(block_size: int) -> None:
    expected = attend(stored(ROWS["mixed"], SHAPES[0]))
    out = attend(stored(ROWS["mixed"], replace(SHAPES[0], block_size=block_size)))
    assert torch.equal(out, expected)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_schedules_give_the_same_bits(shape: Shape) -> None:
    """One prefill; chunks of many sizes; one decode per token: equal in every bit."""
    length = 1700
    batch = stored([(0, length)], shape, num_padding=0)
    whole = scheduled(batch, [length])
    schedules = {
        "decode": [1] * length,
        "chunks of 7": [7] * (length // 7) + [length % 7],
        "chunks of 512": [512, 512, 512, length - 3 * 512],
        "mixed": [1, 2, 500, 1, 9, 64, 1, 1, 700, length - 1279],
    }
    different = {
        name: (scheduled(batch, chunks) != whole).sum().item() for name, chunks in schedules.items()
    }
    assert different == dict.fromkeys(schedules, 0), f"of {whole.numel()} elements"


@pytest.mark.parametrize("shape", SHAPES[:2], ids=str)
def test_rows_do_not_see_their_neighbours(shape: Shape) -> None:
    for rows in (ROWS["mixed"], ROWS["ragged decode"] * 40):
        batch = stored(rows, shape)
        together = attend(batch)
        first = 0
        for b, (_, n) in enumerate(rows[: len(ROWS["mixed"])]):
            tokens = torch.arange(first, first + n, device="cuda")
            first += n
            if n:
                alone = attend(restricted(batch, [b], tokens, [0, n]))
                assert torch.equal(alone, together[tokens]), (b, rows[b])


@pytest.mark.parametrize("shape", SHAPES[:2], ids=str)
def test_replays_of_a_graph_change_no_bit(shape: Shape) -> None:
    """Decodes of ragged lengths, alone and beside a chunk, with one set of counters."""
    length = 2100
    batch = stored([(0, length)], shape, num_padding=0)
    whole = scheduled(batch, [length])
    singles = [0, 15, 16, 127, 128, 511, 512, 1023, 1024, 1500, 2047, 2048, length - 1]
    decode = [(p, p + 1) for p in singles]
    schedules = {
        "decode": decode,
        "one": decode[-1:],
        "many": decode * 5,
        "mixed": [*decode[:5], (600, 640), *decode[5:]],
    }
    counters = torch.zeros(1024, dtype=torch.int32, device="cuda")

    def run(arguments: tuple) -> Tensor:
        return launch.paged_attention(*bundled(*arguments), arrival_counters=counters)

    calls = {name: rescheduled(batch, ranges) for name, ranges in schedules.items()}
    for arguments in calls.values():
        run(arguments)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outputs = [(name, run(arguments)) for _ in range(20) for name, arguments in calls.items()]
    for _, out in outputs:
        out.fill_(float("nan"))
    graph.replay()
    for name, out in outputs:
        expected = torch.cat([whole[begin:end] for begin, end in schedules[name]])
        assert torch.equal(out, expected), name
    assert not counters.any()


@pytest.mark.parametrize("shape", [SHAPES[0], SHAPES[3], SHAPES[6]], ids=str)
def test_warps_and_registers_change_no_bit(shape: Shape) -> None:
    """Decode of many rows and of few, by as many warps as are quick, beside one prefill."""
    length = 900
    batch = stored([(0, length)], shape, num_padding=0)
    whole = scheduled(batch, [length])
    base = choose_tiling(shape.dtype, shape.dk, shape.dv, torch.float8_e4m3fn)
    for num_rows in (length, 80, 1):
        ranges = [(p, p + 1) for p in range(length - num_rows, length)]
        arguments = bundled(*rescheduled(batch, ranges))
        for warps in (1, 2, 4):
            tiling = replace(base, decode_warps=warps, many_warps=warps)
            out = launch.paged_attention(*arguments, tiling=tiling)
            assert torch.equal(out, whole[length - num_rows :]), (num_rows, warps)


needs_hopper = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9,
    reason="Hopper's prefill needs a GPU of compute capability 9.0",
)
HOPPER = [
    Shape(hq=32, hkv=8, dk=128, dv=128, dtype=BF16, is_e4m3=True),
    Shape(hq=16, hkv=8, dk=128, dv=128, block_size=32, has_sinks=True, dtype=BF16, is_e4m3=True),
    Shape(hq=8, hkv=8, dk=128, dv=128, block_size=64, dtype=torch.float16, is_e4m3=True),
    Shape(hq=16, hkv=2, dk=64, dv=64, block_size=256, dtype=BF16, is_e4m3=True),
    Shape(hq=9, hkv=3, dk=64, dv=64, block_size=32, has_sinks=True, window=128, dtype=BF16,
          is_e4m3=True),
    Shape(hq=14, hkv=2, dk=128, dv=128, softcap=30.0, dtype=torch.float16, is_e4m3=True),
    Shape(hq=4, hkv=4, dk=128, dv=128, window=63, softcap=5.0, block_size=128, dtype=BF16,
          is_e4m3=True),
]  # fmt: skip


def both_prefills(batch: Any, monkeypatch: pytest.MonkeyPatch, has_scales: bool) -> list[Any]:
    """Outputs of Hopper's prefill, which has to serve, and of Triton's."""
    from pagespec.kernels.attention import prefill_sm90

    served = []
    start = prefill_sm90.launch

    def noted(*arguments: Any) -> bool:
        served.append(start(*arguments))
        return served[-1]

    def run() -> Any:
        query, kv, params = bundled(*batch.attend)
        rows = launch.quantized_like(query, kv.v_cache) if has_scales else None
        out = launch.paged_attention(query, kv, params, rows=rows)
        return out.view(torch.uint8 if has_scales else torch.int16), rows and rows.scales

    with monkeypatch.context() as patched:
        patched.setattr(prefill_sm90, "launch", noted)
        ours = run()
        assert served == [True]
        with registry().changed(without=("prefill_attention",)):
            return [ours, run()]


@needs_hopper
@pytest.mark.parametrize("shape", HOPPER, ids=str)
def test_prefill_of_hopper_has_the_bits_of_any(
    shape: Shape, monkeypatch: pytest.MonkeyPatch
) -> None:
    batches = [rows for name, rows in ROWS.items() if any(n > 1 for _, n in rows)]
    batches += [[(4096, 128), (63, 2), (0, 64)], [(0, 1500)], [(500, 30), (511, 2), (0, 65)]]
    batches.append([(45_000, 700), (30, 40), (9000, 130), (7, 1), (0, 33)])  # head by head
    for rows in batches:
        batch = stored(rows, shape)
        (ours, _), (other, _) = both_prefills(batch, monkeypatch, False)
        assert torch.equal(ours, other), rows


@needs_hopper
def test_hopper_quantises_outputs_as_any(monkeypatch: pytest.MonkeyPatch) -> None:
    for shape in HOPPER[:2]:
        batch = stored([(700, 90), (0, 200), (3, 1)], shape)
        (ours, scales), (other, other_scales) = both_prefills(batch, monkeypatch, True)
        assert torch.equal(ours, other)
        assert torch.equal(scales, other_scales)


@needs_hopper
@pytest.mark.parametrize("size", [1e-4, 1e-2, 1.0, 30.0])
def test_hopper_has_the_bits_of_any_for_numbers_of_every_size(
    size: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Most elements are subnormal beside one that no query multiplies; scales are far apart, and a
    key and a value of others' rows are infinite."""
    shape = HOPPER[0]
    rows = [(0, 600), (0, 70), (300, 300), (0, 9)]
    batch = make_batch(rows, shape, num_padding=0, device="cuda")
    query, (key, value) = batch.attend[0], batch.store[:2]
    query[..., 0] = 0
    for x in (key, value):
        # 448 stands for the first element: 2^-6 is the smallest normal number.
        x[..., 1:] *= size
        x[..., 0] = 448 * 2**6 * size
        x *= 10 ** torch.linspace(-3, 3, x[..., 0].numel(), device="cuda").view(*x.shape[:2], 1)
    key *= 1e-3 / size
    key[600, 0, 5] = value[601, 1, 5] = float("inf")
    ops.kv_store(*batch.store)
    (ours, _), (other, _) = both_prefills(batch, monkeypatch, False)
    wide, expected = ours.view(BF16), other.view(BF16)
    assert torch.equal(wide.isnan(), expected.isnan())
    assert wide[600:670].isnan().any()
    assert not wide[:600].isnan().any()
    assert torch.equal(wide.nan_to_num(7.0), expected.nan_to_num(7.0))


def bytes_of(caches: Any) -> list[Tensor]:
    return [cache[:-1].view(torch.uint8).cpu() for cache in caches]


@pytest.mark.parametrize("dtype", [torch.float32, BF16, torch.float16], ids=str)
def test_a_store_writes_the_bytes_of_a_cpu(dtype: torch.dtype) -> None:
    """Values of every magnitude, including zeros. Other bytes of the cache do not change."""
    for hkv, dk, dv, page in ((8, 128, 128, 16), (3, 80, 96, 32), (1, 24, 40, 16)):
        shape = Shape(hq=2 * hkv, hkv=hkv, dk=dk, dv=dv, block_size=page, is_e4m3=True, dtype=dtype)
        batch = make_batch([(3, 400), (0, 70), (15, 1)], shape, device="cuda")
        key, value, *caches, slots = batch.store
        key[2, 0] = 0
        key.mul_(10 ** torch.linspace(-4, 4, key[..., 0].numel(), device="cuda").view(-1, hkv, 1))
        value[1, 0, 1:] = 0
        expected = [cache.cpu() for cache in caches]
        dispatch.kv_store(key.cpu(), value.cpu(), *expected, slots.cpu())
        ops.kv_store(*batch.store)
        assert all(map(torch.equal, bytes_of(caches), bytes_of(expected)))


@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("has_norm", [True, False])
def test_one_launch_is_two(has_norm: bool, dim: int) -> None:
    """Norm, rotation and store within decode: outputs and bytes of the separate kernels."""
    shape = Shape(hq=16, hkv=8, dk=dim, dv=dim, is_e4m3=True, dtype=BF16)
    for rows in (ROWS["ragged decode"], [(15, 2), (640, 1), (0, 0)], [(900, 1)]):
        batch = make_batch(rows, shape, num_padding=0, device="cuda")
        _, k_cache, v_cache, *rest = batch.attend
        slots = batch.store[-1]
        merged = torch.randn(len(slots), 32 * dim, device="cuda").to(BF16)
        query, key, value = (
            x.unflatten(1, (-1, dim)) for x in merged.split((16 * dim, 8 * dim, 8 * dim), 1)
        )
        angles = torch.randn(1, len(slots), dim, device="cuda")
        weights = [torch.randn(dim, device="cuda").to(BF16) if has_norm else None for _ in "qk"]
        inputs = RopeInputs(
            query, key, value, angles.cos().to(BF16), angles.sin().to(BF16), dim, *weights, 1e-6,
            "rounded",
        )  # fmt: skip
        assert fits(query, key, value, has_norm, True)
        ours, theirs = ([cache.clone() for cache in (k_cache, v_cache)] for _ in range(2))
        rotated = norm_rope_store.norm_rope_store(inputs, *theirs, slots)
        expected = ops.paged_attention(rotated, *theirs, *rest)
        for _ in range(5):
            _, kv, params = bundled(query, *ours, *rest)
            assert torch.equal(launch.fused_rope_attention(inputs, slots, kv, params), expected)
            assert all(map(torch.equal, bytes_of(ours), bytes_of(theirs)))


def test_blocks_are_copied_with_their_scales() -> None:
    batch = stored([(30, 9), (70, 1)], SHAPES[0])
    caches = batch.store[2:4]
    table, rows = batch.attend[5:7]
    copier = BlockCopier([caches])
    free = min(set(range(len(caches[0]) - 1)) - set(table[rows].flatten().tolist()))
    source = int(table[rows[1], 0])
    copier.copy(torch.tensor([source, free], dtype=torch.int32, device="cuda"))
    for cache in caches:
        vectors, scales = e4m3.planes_of(cache)
        assert torch.equal(vectors[free], vectors[source])
        assert torch.equal(scales[free], scales[source])
    expected = attend(batch)
    table[rows[1], 0] = free
    assert torch.equal(attend(batch), expected)
