"""Grouped matmuls on a GPU: against one matmul per expert, and bit against bit over tiles."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

pytestmark = pytest.mark.gpu

# block_m, block_n, block_k, num_stages, num_warps, swap_ab
TILES = [
    (16, 64, 64, 3, 4, False),
    (16, 64, 128, 5, 4, True),
    (16, 32, 128, 3, 4, False),
    (32, 64, 128, 4, 4, True),
    (64, 64, 64, 3, 4, False),
    (64, 128, 128, 3, 8, True),
    (128, 128, 64, 3, 8, False),
    (128, 256, 64, 3, 8, False),
]
COUNTS = [
    [0, 1, 0, 0, 0, 0, 0, 0],
    [1, 0, 2, 0, 0, 1, 0, 3],
    [17, 0, 130, 5, 0, 0, 64, 16],
    [0, 0, 0, 0, 0, 0, 0, 300],
    [0] * 8,
]


def normal(*shape: int, dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> Tensor:
    generator = torch.Generator("cuda").manual_seed(seed)
    return torch.randn(shape, generator=generator, device="cuda").to(dtype)


def tile_of(tile: tuple) -> object:
    from pagespec.kernels.matmul.matmul import Tile

    m, n, k, stages, warps, swap = tile
    return Tile(block_m=m, block_n=n, block_k=k, num_stages=stages, num_warps=warps, swap_ab=swap)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("k_is_inner", [True, False])
@pytest.mark.parametrize("counts", COUNTS)
def test_each_expert_multiplies_its_rows(
    counts: list[int], k_is_inner: bool, dtype: torch.dtype
) -> None:
    from pagespec.kernels.moe.grouped_mm import grouped_mm

    num_rows, num_outs, k_size = sum(counts) + 3, 200, 192
    x = normal(num_rows, k_size, dtype=dtype)
    shape = (8, num_outs, k_size) if k_is_inner else (8, k_size, num_outs)
    weight = normal(*shape, dtype=dtype, seed=1)
    # Of an expert that nothing chose, nothing may be read.
    weight[[i for i, count in enumerate(counts) if not count]] = float("nan")
    weight = weight.transpose(1, 2) if k_is_inner else weight
    offs = torch.tensor(counts, device="cuda").cumsum(0).int()
    out = grouped_mm(x, weight, offs)
    begin = 0
    tolerance = {torch.float32: 1e-5, torch.bfloat16: 1.6e-2, torch.float16: 2e-3}[dtype]
    for expert, end in enumerate(offs.tolist()):
        if end > begin:
            expected = x[begin:end].double() @ weight[expert].double()
            error = (out[begin:end].double() - expected).abs().max() / expected.abs().max()
            assert error < tolerance
        begin = end
    assert (out[begin:] == 0).all()


@pytest.mark.parametrize(("k_size", "k_is_inner"), [(192, True), (2048, True), (768, False)])
def test_no_tile_changes_a_bit(k_size: int, k_is_inner: bool) -> None:
    from pagespec.kernels.moe.grouped_mm import grouped_mm

    counts = [17, 0, 130, 5, 0, 0, 64, 16]
    x = normal(sum(counts), k_size)
    shape = (8, 384, k_size) if k_is_inner else (8, k_size, 384)
    weight = normal(*shape, seed=1)
    weight = weight.transpose(1, 2) if k_is_inner else weight
    offs = torch.tensor(counts, device="cuda").cumsum(0).int()
    results = [grouped_mm(x, weight, offs, tile=tile_of(tile)) for tile in TILES]
    for tile, result in zip(TILES, results, strict=True):
        assert torch.equal(result, results[0]), tile


def test_a_gate_changes_no_bit() -> None:
    from pagespec.kernels.fused.activation import act_mul
    from pagespec.kernels.moe.grouped_mm import grouped_mm

    counts = [17, 0, 130, 5, 0, 0, 64, 16]
    x, weight = normal(sum(counts) + 4, 768), normal(8, 768, 768, seed=1).transpose(1, 2)
    offs = torch.tensor(counts, device="cuda").cumsum(0).int()
    gate, up = grouped_mm(x, weight, offs).chunk(2, 1)
    expected = act_mul(gate, up, "silu")
    for tile in (*TILES[:-3], TILES[-2]):  # the others do not fit with two weights
        found = grouped_mm(x, weight, offs, has_gate=True, tile=tile_of(tile))
        assert torch.equal(found, expected), tile


def test_a_row_has_its_bits_alone_and_in_any_company() -> None:
    from pagespec.kernels.moe.grouped_mm import grouped_mm

    weight = normal(8, 1536, 2048, seed=1).transpose(1, 2)
    row = normal(1, 2048, seed=2)
    expected = None
    for before, behind in [(0, 0), (1, 0), (0, 15), (7, 100), (300, 20), (3000, 9000)]:
        x = normal(before + 1 + behind, 2048, seed=3)
        x[before] = row
        # Its neighbours are those of its own expert, and of others, which may even be NaN.
        x = torch.cat([normal(5, 2048, seed=4) * float("nan"), x, normal(70, 2048) / 0.0])
        counts = [2, 3, 0, before + 1 + behind, 0, 60, 10, 0]
        offs = torch.tensor(counts, device="cuda").cumsum(0).int()
        found = grouped_mm(x, weight, offs)[5 + before]
        expected = found if expected is None else expected
        assert found.isfinite().all()
        assert torch.equal(found, expected), (before, behind)


@pytest.mark.parametrize("num_rows", [1, 8, 512, 2048, 2049, 65_536])
@pytest.mark.parametrize("num_experts", [1, 8, 60, 128])
def test_sorts_as_a_stable_sort(num_rows: int, num_experts: int) -> None:
    from pagespec.kernels.moe.sort_by_expert import sort_by_expert

    generator = torch.Generator("cuda").manual_seed(num_rows)
    # Some of no expert here.
    ids = torch.randint(0, num_experts + 2, (num_rows,), generator=generator, device="cuda")
    got, order, inverse, offs = sort_by_expert(ids, num_experts)
    is_ours = ids < num_experts
    _, expected_order = torch.sort(ids.clamp(max=num_experts), stable=True)
    assert torch.equal(order, expected_order)
    assert torch.equal(got, ids[expected_order])
    assert torch.equal(order[inverse], torch.arange(num_rows, device=ids.device))
    counts = torch.bincount(ids[is_ours], minlength=num_experts)
    assert torch.equal(offs, counts.cumsum(0).int())
