"""The attention kernels on a GPU: against float64, and bit against bit.

Bitwise tests compare a query's output under different schedules: repeated, alone or among others,
as a decode, in chunks or in one prefill. All uninitialised memory is filled with NaN.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import accumulate
from typing import Any

import pytest
import torch
from torch import Tensor

from pagespec.kernels import ops
from pagespec.kernels.attention import launch as triton_attention
from pagespec.kernels.attention import reference
from pagespec.kernels.attention.decode import decode_kernel
from pagespec.kernels.attention.prefill import prefill_kernel
from pagespec.kernels.attention.triton_backend import TritonBackend, longest_first
from pagespec.kernels.fused import kv_store
from pagespec.kernels.registry import registry
from tests.support.hopper import has_hopper_kernels
from tests.support.paged import (
    Batch,
    Rows,
    Shape,
    bundled,
    float64_attention,
    make_batch,
    rescheduled,
)

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("poisoned")]

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
# Largest error allowed, beside an output of size about 1: a few roundings of weights and outputs.
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 1.6e-2, torch.float16: 2e-3}

ROWS: dict[str, Rows] = {
    "ragged decode": [(0, 1), (1, 1), (15, 1), (4999, 1), (511, 1), (512, 1), (1023, 1), (700, 1)],
    "mixed": [(0, 5), (17, 1), (1020, 9), (3, 1), (0, 1), (2048, 1), (440, 2), (0, 0), (77, 600)],
    "prefill": [(0, 1337), (0, 2), (0, 64)],
    "extend": [(3000, 130), (511, 2), (512, 3)],
    "empty rows": [(5, 1), (0, 0), (0, 4), (0, 0), (0, 0), (0, 0), (0, 0), (600, 2)],
    "singles in front": [(9, 1), (700, 1), (30, 1), (5, 2), (0, 0), (44, 300), (8, 1)],
}
BF16 = torch.bfloat16
SHAPES = [
    Shape(hq=16, hkv=8, dk=128, dv=128, dtype=BF16),
    Shape(hq=9, hkv=3, dk=64, dv=64, block_size=32, has_sinks=True, window=128, dtype=BF16),
    Shape(hq=8, hkv=4, dk=256, dv=256, softcap=50.0, block_size=128, dtype=BF16),
    Shape(hq=32, hkv=8, dk=128, dv=128, block_size=256, dtype=BF16),
    Shape(hq=8, hkv=8, dk=80, dv=80, window=513, softcap=5.0, block_size=64, dtype=BF16),
    Shape(hq=8, hkv=1, dk=192, dv=128, dtype=BF16),
]
# Compiling takes most of the time: not all shapes in all dtypes, and fewer where bits are compared.
OTHER_DTYPES = [
    replace(SHAPES[0], dtype=torch.float32),
    replace(SHAPES[1], dtype=torch.float32),
    replace(SHAPES[1], dtype=torch.float16),
]
BITWISE = [*SHAPES[:3], OTHER_DTYPES[0]]


def stored(rows: Rows, shape: Shape, *, num_padding: int = 3) -> Batch:
    batch = make_batch(rows, shape, num_padding=num_padding, device="cuda")
    ops.kv_store(*batch.store)
    return batch


def attend(batch: Batch) -> Tensor:
    return ops.paged_attention(*batch.attend)


@pytest.mark.parametrize("shape", SHAPES + OTHER_DTYPES, ids=str)
def test_matches_float64(shape: Shape) -> None:
    for name, rows in ROWS.items():
        for num_padding in (0, 3):
            batch = stored(rows, shape, num_padding=num_padding)
            out = attend(batch)
            error = (out[: batch.num_tokens].double() - float64_attention(batch, rows, shape)).abs()
            largest = error.max().item()
            assert largest <= TOLERANCE[shape.dtype], (name, num_padding)  # false for NaN
            assert (out[batch.num_tokens :] == 0).all(), name


@pytest.mark.parametrize("block_size", [16, 32, 64, 128, 256])
def test_block_sizes_give_the_same_bits(block_size: int) -> None:
    expected = attend(stored(ROWS["mixed"], SHAPES[0]))
    out = attend(stored(ROWS["mixed"], replace(SHAPES[0], block_size=block_size)))
    assert torch.equal(out, expected)


def test_store_copies_bits_to_exactly_its_slots() -> None:
    for dtype in DTYPES:
        shape = Shape(hq=8, hkv=4, dk=80, dv=96, dtype=dtype)
        batch = make_batch(ROWS["mixed"], shape, device="cuda")
        key, value, k_cache, v_cache, slots = batch.store
        expected_k, expected_v = k_cache.clone(), v_cache.clone()
        own = slots[: batch.num_tokens]
        expected_k.view(-1, 4, 80)[own] = key[: batch.num_tokens]
        expected_v.view(-1, 4, 96)[own] = value[: batch.num_tokens]
        ops.kv_store(*batch.store)
        for cache, expected in ((k_cache, expected_k), (v_cache, expected_v)):
            same = (cache == expected) | (cache.isnan() & expected.isnan())
            assert same.all()


@pytest.mark.parametrize("shape", BITWISE, ids=str)
def test_repeats_to_the_bit(shape: Shape) -> None:
    for rows in ROWS.values():
        batch = stored(rows, shape)
        k_cache, v_cache = (cache[:-1].nan_to_num() for cache in batch.store[2:4])
        expected = attend(batch)
        for _ in range(20):
            ops.kv_store(*batch.store)  # in the null block, the last one, tokens of padding race
            assert torch.equal(batch.store[2][:-1].nan_to_num(), k_cache)
            assert torch.equal(batch.store[3][:-1].nan_to_num(), v_cache)
            assert torch.equal(attend(batch), expected)


def restricted(batch: Batch, rows: list[int], tokens: Tensor, starts: list[int]) -> Batch:
    """The same caches with some of the rows; ``tokens`` are the remaining queries."""
    query, k_cache, v_cache, _, contexts, tables, table_rows, *rest = batch.attend
    device = query.device
    index = torch.tensor(rows, device=device)
    attend = (
        query[tokens],
        k_cache,
        v_cache,
        torch.tensor(starts, dtype=torch.int32, device=device),
        contexts[index],
        tables,
        table_rows[index],
        *rest,
    )
    return Batch(batch.store, attend, [], len(tokens))


@pytest.mark.parametrize("shape", BITWISE, ids=str)
def test_rows_do_not_see_their_neighbours(shape: Shape) -> None:
    """Every row alone, with other numbers of programs and splits in use, has the same bits."""
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


def scheduled(batch: Batch, chunks: list[int]) -> Tensor:
    """The outputs of a batch of one row whose queries arrive in ``chunks``, one row each."""
    ends = list(accumulate(chunks))
    ranges = [(end - n, end) for n, end in zip(chunks, ends, strict=True)]
    return ops.paged_attention(*rescheduled(batch, ranges))


@pytest.mark.parametrize("shape", BITWISE, ids=str)
def test_schedules_give_the_same_bits(shape: Shape) -> None:
    """One prefill; chunks of many sizes; one decode per token: equal in every bit."""
    length = 1700
    batch = stored([(0, length)], shape, num_padding=0)
    whole = scheduled(batch, [length])
    schedules = {
        "decode": [1] * length,
        "halves": [length // 2, length - length // 2],
        "chunks of 7": [7] * (length // 7) + [length % 7],
        "chunks of 512": [512, 512, 512, length - 3 * 512],
        "mixed": [1, 2, 500, 1, 9, 64, 1, 1, 700, length - 1279],
    }
    different = {
        name: (scheduled(batch, chunks) != whole).sum().item() for name, chunks in schedules.items()
    }
    assert different == dict.fromkeys(schedules, 0), f"of {whole.numel()} elements"


@pytest.mark.skipif(
    not has_hopper_kernels(),
    reason="for Hopper, in the Gluon of some Tritons",
)
@pytest.mark.parametrize(
    "shape",
    [
        *SHAPES[:3],
        *SHAPES[4:],
        Shape(hq=32, hkv=8, dk=64, dv=64, block_size=64, dtype=BF16),
        Shape(hq=14, hkv=2, dk=128, dv=128, block_size=256, dtype=torch.float16),
        Shape(hq=4, hkv=4, dk=96, dv=96, window=63, dtype=BF16),
        Shape(hq=16, hkv=8, dk=256, dv=256, window=100, has_sinks=True, dtype=BF16),
        Shape(hq=4, hkv=2, dk=160, dv=160, window=1, dtype=torch.float16),
    ],
    ids=str,
)
def test_prefill_of_hopper_has_the_bits_of_any(
    shape: Shape, monkeypatch: pytest.MonkeyPatch
) -> None:
    from pagespec.kernels.attention import prefill_sm90

    launched: list[bool] = []
    launch = prefill_sm90.launch

    def noted(*arguments: Any) -> bool:
        launched.append(launch(*arguments))
        return launched[-1]

    monkeypatch.setattr(prefill_sm90, "launch", noted)
    batches = [*ROWS.values(), [(4096, 128), (63, 2), (0, 64)]]
    batches.append([(0, 1)] * 2100 + [(0, 5), (3, 1)])  # rows are looked at 1,024 at a time
    batches.append([(45_000, 700), (30, 40), (9000, 130), (7, 1), (0, 33)])  # long: head by head
    for rows in batches:
        batch = stored(rows, shape)
        out = attend(batch)
        with registry().changed(without=("prefill_attention",)):
            assert torch.equal(attend(batch), out), rows
    assert launched == [True] * len(batches)


@pytest.mark.parametrize("shape", BITWISE, ids=str)
def test_merging_never_changes_a_bit(shape: Shape) -> None:
    """Decodes of ragged lengths, alone and beside a chunk, fifty times each in one CUDA graph that
    shares one set of counters: always the bits of the prefill."""
    length = 2100
    batch = stored([(0, length)], shape, num_padding=0)
    whole = scheduled(batch, [length])
    singles = [0, 15, 16, 127, 128, 511, 512, 1023, 1024, 1500, 2047, 2048, length - 1]
    decode = [(p, p + 1) for p in singles]
    schedules = {
        "decode": decode,
        "one": decode[-1:],
        "many": decode * 5,  # the first segment reaches to split_change
        "longest first": (decode * 5)[:64],
        "mixed": [*decode[:5], (600, 640), *decode[5:]],
    }
    arrival_counters = torch.zeros(1024, dtype=torch.int32, device="cuda")

    def run(arguments: tuple) -> Tensor:
        query, kv, params = bundled(*arguments)
        return triton_attention.paged_attention(
            query,
            kv,
            params,
            arrival_counters=arrival_counters,
            order=longest_first(kv.context_lens, 512),  # needed with many programs
        )

    calls = {name: rescheduled(batch, ranges) for name, ranges in schedules.items()}
    for arguments in calls.values():
        run(arguments)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outputs = [(name, run(arguments)) for _ in range(50) for name, arguments in calls.items()]
    for _, out in outputs:
        out.fill_(float("nan"))
    graph.replay()
    expected = {
        name: torch.cat([whole[begin:end] for begin, end in ranges])
        for name, ranges in schedules.items()
    }
    wrong = [name for name, out in outputs if not torch.equal(out, expected[name])]
    assert wrong == []
    assert not arrival_counters.any()


def test_counters_are_not_made_while_capturing() -> None:
    """Otherwise they would be zero only after that graph has been replayed."""
    batch = stored(ROWS["ragged decode"], SHAPES[0])
    attention = TritonBackend()
    with torch.cuda.graph(torch.cuda.CUDAGraph()):
        batch.attend[0].add_(0)
        with pytest.raises(RuntimeError, match="once before"):
            attention.attend(*bundled(*batch.attend))
    expected = attention.attend(*bundled(*batch.attend))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = attention.attend(*bundled(*batch.attend))
    for _ in range(3):
        out.fill_(float("nan"))
        graph.replay()
        assert torch.equal(out, expected)


def test_captures_and_replays_with_other_contents() -> None:
    """A CUDA graph of store and attention serves all batches of the same shapes."""
    for rows in (ROWS["ragged decode"], ROWS["mixed"]):
        batch = stored(rows, SHAPES[0])
        num_queries = torch.tensor([n for _, n in rows], device="cuda", dtype=torch.int32)
        query, contexts = batch.attend[0], batch.attend[4]
        attend(batch)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            ops.kv_store(*batch.store)
            out = attend(batch)
        for _ in range(3):
            out.fill_(float("nan"))
            query.normal_()
            torch.maximum(contexts - 1, num_queries, out=contexts)
            graph.replay()
            assert torch.equal(out, attend(batch))


def test_the_bare_op_runs_the_reference_where_triton_cannot() -> None:
    shape = Shape(hq=8, hkv=4, dk=64, dv=64)
    odd = replace(shape, block_size=24)
    batch = stored(ROWS["mixed"], odd)
    out = attend(batch)
    assert torch.equal(out, reference.paged_attention(*bundled(*batch.attend)))
    batch = stored(ROWS["mixed"], shape)
    out = attend(batch)
    assert torch.equal(out, triton_attention.paged_attention(*bundled(*batch.attend)))
    error = (out - reference.paged_attention(*bundled(*batch.attend))).abs()
    assert 0 < error.max().item() < 1e-4  # another order of summation


def num_compiled() -> int:
    """Kernels compiled so far, of all that attention and the store use."""
    kernels = (decode_kernel, prefill_kernel, kv_store._store_kernel)
    device = torch.cuda.current_device()
    return sum(len(kernel.device_caches[device][0]) for kernel in kernels)


def test_no_batch_compiles_a_kernel_anew() -> None:
    """Sizes 1 and multiples of 16 among others; tables of any width; metadata at any address."""

    def run(num_rows: int, context: int, num_queries: int, offset: int) -> None:
        batch = stored([(context, num_queries)] * num_rows, SHAPES[0], num_padding=0)
        query, k_cache, v_cache, *metadata, scale, window, softcap, sinks = batch.attend
        moved = []
        for tensor in metadata:
            buffer = torch.zeros(tensor.numel() + offset, dtype=torch.int32, device="cuda")
            moved.append(buffer[offset:].view(tensor.shape).copy_(tensor))
        head_major = query.transpose(0, 1).contiguous().transpose(0, 1)
        rest = (k_cache, v_cache, *moved, scale, window, softcap, sinks)
        for view in (query, head_major):
            assert torch.equal(ops.paged_attention(view, *rest), attend(batch))

    for num_rows in (2, 33, 64, 257):  # each way to spread pieces over programs
        run(num_rows, 700, 1, 0)
        run(num_rows, 700, 2, 0)
    before = num_compiled()
    for num_rows in (1, 3, 16, 17, 32, 48, 128, 256, 300):
        for context, num_queries, offset in ((5, 1, 1), (16 * 15, 1, 3), (900, 1, 0), (40, 3, 1)):
            run(num_rows, context, num_queries, offset)
    assert num_compiled() == before
