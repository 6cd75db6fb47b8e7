"""Norm, rotation, cache write and attention in one launch on a GPU: the bits of two launches."""

from __future__ import annotations

import pytest
import torch

from pagespec.kernels.attention.decode import decode_kernel
from pagespec.kernels.attention.decode_prologue import fits
from pagespec.kernels.attention.triton_backend import TritonBackend
from tests.kernels.attention.rope_prologue import Case, same_bits
from tests.support.paged import Rows, Shape

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("poisoned")]

BF16 = torch.bfloat16
EDGES = [0, 1, 14, 15, 16, 63, 64, 127, 128, 510, 511, 512, 1023, 1024, 2047]
DECODE: Rows = [(n, 1) for n in EDGES]
SEVERAL: Rows = [(87, 3), (580, 20), (630, 70), (29, 1), *[(0, 0)] * 90]
SHAPES = [
    Shape(hq=16, hkv=8, dk=128, dv=128, dtype=BF16),
    Shape(hq=32, hkv=8, dk=128, dv=128, block_size=256, softcap=5.0, has_sinks=True, dtype=BF16),
    Shape(hq=40, hkv=8, dk=128, dv=128, dtype=BF16),
    Shape(hq=16, hkv=8, dk=64, dv=64, block_size=64, window=100, dtype=torch.float16),
    Shape(hq=8, hkv=4, dk=256, dv=256, window=100, softcap=5.0, dtype=BF16),
]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_one_launch_gives_the_bits_of_two(shape: Shape) -> None:
    # One program per split; the first segment up to split_change; several tokens per row.
    for rows, num_padding in ((DECODE[-1:], 1), (DECODE, 2), (DECODE * 4, 0), (SEVERAL, 0)):
        case = Case(shape, rows, num_padding=num_padding, device="cuda")
        assert fits(*case.inputs[:3], has_norm=True)
        case.check()


@pytest.mark.parametrize("form", ["", "wide", "plus_one"])
def test_forms(form: str) -> None:
    for rotary_dim, half_tables in ((0, True), (32, False)):
        options = {"rotary_dim": rotary_dim, "half_tables": half_tables, "form": form}
        Case(SHAPES[0], DECODE, device="cuda", **options).check()


def test_float32_stays_two_launches() -> None:
    shape = Shape(hq=16, hkv=8, dk=128, dv=128)
    Case(shape, DECODE, num_padding=1, device="cuda").check(
        call=TritonBackend().fused_rope_attention
    )


def test_replays_with_other_contents() -> None:
    """A CUDA graph serves all batches of its shapes, and leaves its counters as zeros."""
    counted = TritonBackend()
    for rows in (DECODE[-2:], DECODE, DECODE * 4):
        case = Case(SHAPES[0], rows, num_padding=1, device="cuda")
        k_cache, v_cache = (cache.nan_to_num() for cache in (case.k_cache, case.v_cache))
        arguments = (case.inputs, case.slots, *case.attention_of(k_cache, v_cache))
        counted.fused_rope_attention(*arguments)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = counted.fused_rope_attention(*arguments)
        for _ in range(3):
            out.fill_(float("nan"))
            case.inputs.query.normal_()
            case.inputs.key.normal_()
            graph.replay()
            # The same step once more: what it stored is stored again.
            case.k_cache, case.v_cache = k_cache, v_cache
            expected = case.two()
            assert same_bits(out, expected[0])
            assert same_bits(k_cache[:-1], expected[1][:-1])


def test_no_batch_compiles_the_kernel_anew() -> None:
    def run(num_rows: int, context: int) -> None:
        rows = [(context, 1)] * num_rows
        Case(SHAPES[0], rows, num_padding=0, device="cuda").one()

    for num_rows in (2, 33, 64):  # each way to spread pieces over programs
        run(num_rows, 700)
    kernels = decode_kernel.device_caches[torch.cuda.current_device()][0]
    before = len(kernels)
    for num_rows in (1, 3, 8, 16, 17, 32, 48, 64):
        for context in (5, 240, 900):
            run(num_rows, context)
    assert len(kernels) == before
