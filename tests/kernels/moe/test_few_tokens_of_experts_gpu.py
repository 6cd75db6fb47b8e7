"""The fused launches around experts of few tokens, on a GPU: the bits of the separate kernels.

Also tests them in CUDA graphs, where a kernel may start before the previous one has ended.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

pytestmark = pytest.mark.gpu

DTYPES = [torch.bfloat16, torch.float16, torch.float32]


def normal(*shape: int, dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> Tensor:
    generator = torch.Generator("cuda").manual_seed(seed)
    return torch.randn(shape, generator=generator, device="cuda").to(dtype)


def starts_of(num_real: int) -> Tensor:
    return torch.tensor([0, num_real], dtype=torch.int32, device="cuda")


def same_bits(found: tuple[Tensor, ...], expected: tuple[Tensor, ...]) -> bool:
    return all(
        torch.equal(a.view(torch.uint8), b.view(torch.uint8))
        for a, b in zip(found, expected, strict=True)
    )


def route_apart(
    logits: Tensor, tokens: Tensor, top_k: int, normalisation: str, starts: Tensor | None
) -> tuple[Tensor, ...]:
    from pagespec.kernels.moe.expert_rows import spread_rows
    from pagespec.kernels.moe.route import route
    from pagespec.kernels.moe.sort_by_expert import sort_by_expert

    weights, ids = route(logits, top_k, normalisation, tokens.dtype)
    _, _, inverse, offs = sort_by_expert(ids.view(-1), logits.shape[1], top_k, starts)
    return spread_rows(tokens, inverse, top_k), weights, inverse, offs


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("num_experts", "top_k", "hidden_size"),
    [(128, 8, 2048), (512, 10, 2048), (60, 4, 2048), (8, 2, 4096), (64, 6, 300), (1024, 16, 136)],
)
@pytest.mark.parametrize("num_tokens", [1, 2, 3, 4, 7, 8, 16])
def test_routing_in_one_launch_has_the_bits_of_three(
    monkeypatch: pytest.MonkeyPatch,
    num_tokens: int,
    num_experts: int,
    top_k: int,
    hidden_size: int,
    dtype: torch.dtype,
) -> None:
    from pagespec.kernels.moe import route_rows as kernel

    tokens = normal(num_tokens, hidden_size, dtype=dtype, seed=1)
    logits = normal(num_tokens, num_experts, dtype=dtype)
    strange = logits.clone()
    strange[0], strange[-1, ::3] = float("nan"), float("inf")
    tied = (logits * 2).round()
    same = logits[:1].expand(num_tokens, -1)
    cases = [("renormalised", None), ("all", None), ("chosen", None)]
    cases += [(name, num_tokens - 1) for name in ("renormalised", "chosen")]
    # Between others' results, at an odd element: as a part of a merged matmul.
    between = torch.full((num_tokens, num_experts + 8), float("nan"), device="cuda", dtype=dtype)
    between[:, 3:-5] = logits
    for each in (logits, strange, tied, same, torch.zeros_like(logits), between[:, 3:-5]):
        for normalisation, num_real in cases:
            starts = None if num_real is None else starts_of(num_real)
            expected = route_apart(each, tokens, top_k, normalisation, starts)
            if num_tokens * top_k <= 64:
                monkeypatch.delattr(kernel, "route", raising=False)  # it is one launch
            found = kernel.route_rows(each, tokens, top_k, normalisation, dtype, starts)
            assert same_bits(found, expected)


@pytest.mark.parametrize(
    ("dtype", "weights_dtype"),
    [*((dtype, dtype) for dtype in DTYPES), (torch.bfloat16, torch.float32)],
)
@pytest.mark.parametrize("form", ["rounded", "wide", "plus_one"])
@pytest.mark.parametrize("hidden_size", [64, 768, 2048, 2880, 4096, 7168])
def test_sum_and_norm_in_one_launch_have_the_bits_of_two(
    monkeypatch: pytest.MonkeyPatch,
    hidden_size: int,
    form: str,
    dtype: torch.dtype,
    weights_dtype: torch.dtype,
) -> None:
    from pagespec.kernels.fused.rms_norm import add_rms_norm
    from pagespec.kernels.moe import expert_rows as kernel
    from pagespec.kernels.moe.expert_rows import combine_experts

    for num_tokens, top_k in ((1, 8), (2, 8), (5, 2), (64, 10)):
        num_rows = num_tokens * top_k
        rows = normal(num_rows, hidden_size, dtype=dtype)
        weights = normal(num_rows, dtype=weights_dtype, seed=1)
        inverse = torch.randperm(num_rows, device="cuda")
        residual = normal(1, num_tokens, hidden_size, dtype=dtype, seed=2)
        norm_weight = normal(hidden_size, dtype=dtype, seed=3)
        x = combine_experts(rows, weights, inverse, top_k, dtype).view(residual.shape)
        expected = add_rms_norm(x, residual, norm_weight, 1e-6, form)
        with monkeypatch.context() as patch:
            patch.delattr(kernel, "combine_experts")  # it is one launch
            found = kernel.combine_add_rms_norm(
                rows, weights, inverse, top_k, residual, norm_weight, 1e-6, form
            )
        assert same_bits(found, expected)


@pytest.mark.parametrize("has_gate", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("hidden_size", [64, 2048, 2880, 7168])
def test_a_shared_expert_in_one_launch_has_the_bits_of_many_tokens(
    monkeypatch: pytest.MonkeyPatch, hidden_size: int, dtype: torch.dtype, has_gate: bool
) -> None:
    from pagespec.kernels.moe import expert_rows as kernel
    from pagespec.kernels.moe.expert_rows import combine_experts

    top_k, form = 8, "rounded"
    total = kernel.MAX_FEW_TOKENS + 7
    rows = normal(total * top_k, hidden_size, dtype=dtype)
    weights = normal(total * top_k, dtype=dtype, seed=1).abs()
    places = torch.arange(total * top_k, device="cuda")
    residual = normal(total, hidden_size, dtype=dtype, seed=2)
    norm_weight = normal(hidden_size, dtype=dtype, seed=3)
    shared = normal(total, hidden_size, dtype=dtype, seed=4)
    # A column of a merged matmul's result.
    gate = (3 * normal(total, 515, dtype=dtype, seed=5))[:, 513:514]

    def of(begin: int, end: int) -> tuple[Tensor, Tensor]:
        of_experts, tokens = slice(begin * top_k, end * top_k), slice(begin, end)
        return kernel.combine_add_rms_norm(
            rows[of_experts], weights[of_experts], places[: (end - begin) * top_k], top_k,
            residual[tokens], norm_weight, 1e-6, form, shared[tokens],
            gate[tokens] if has_gate else None,
        )  # fmt: skip

    whole = of(0, total)
    for begin, end in [(0, 1), (5, 7), (total - 1, total), (3, 3 + kernel.MAX_FEW_TOKENS)]:
        with monkeypatch.context() as patch:
            patch.delattr(kernel, "combine_experts")  # it is one launch
            found = of(begin, end)
        assert same_bits(found, tuple(x[begin:end] for x in whole))
    # Torch's operations, of which only the sigmoid may have another last bit.
    summed = combine_experts(rows, weights, places, top_k, dtype)
    found = combine_experts(rows, weights, places, top_k, dtype, shared, gate if has_gate else None)
    if not has_gate:
        assert same_bits((found,), (summed + shared,))
        return
    added = torch.sigmoid(gate) * shared
    expected = summed + added
    bound = torch.finfo(dtype).eps * (3 * added.abs().float() + expected.abs().float())
    assert ((found.float() - expected.float()).abs() <= bound).all()
    if dtype != torch.float32:  # which rounding hides, but for a gate now and then
        assert (found != expected).float().mean() < 0.05


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_gates_are_within_a_last_place_of_torch(dtype: torch.dtype) -> None:
    """All there are: a shared row of ones, added to zeros, is the gate."""
    from pagespec.kernels.moe.expert_rows import combine_experts

    bits = torch.arange(-1 << 15, 1 << 15, device="cuda").to(torch.int16)
    gate = bits.view(dtype).unsqueeze(1)
    none = torch.zeros(len(gate), 16, dtype=dtype, device="cuda")
    places = torch.arange(len(gate), device="cuda")
    found = combine_experts(none, none[:, 0], places, 1, dtype, torch.ones_like(none), gate)
    expected = torch.sigmoid(gate).expand(-1, 16)
    assert torch.equal(found.isnan(), expected.isnan())
    apart = found.view(torch.int16).int() - expected.contiguous().view(torch.int16).int()
    assert (apart[~found.isnan()].abs() <= 1).all()
    assert (apart[~found.isnan()] != 0).float().mean() < 1e-3


@pytest.mark.parametrize("num_experts", [64, 128])
def test_a_routers_matmul_has_one_order_of_additions(num_experts: int) -> None:
    from pagespec.kernels.device import Gpu
    from pagespec.kernels.matmul.dispatch import linear
    from pagespec.kernels.matmul.matmul import matmul
    from pagespec.kernels.matmul.tiles import choose_tile

    x, weight = normal(16, 2048), normal(num_experts, 2048, seed=1)
    tile = choose_tile(16, num_experts, 2048, 2, False, Gpu.of(x.device))
    expected = matmul(x, weight, tile=tile)
    for num_rows in (1, 2, 4, 8, 9, 16):
        found = linear(x[:num_rows], weight, None, 64)
        assert torch.equal(found, expected[:num_rows])


@pytest.mark.parametrize(("num_tokens", "num_real"), [(2, 1), (2, 2), (4, 4), (16, 11), (40, 40)])
def test_a_captured_chain_has_the_bits_of_one_that_waits(num_tokens: int, num_real: int) -> None:
    """The shape of a layer: norm, router, experts, a shared one with its gate, sum, residual and
    norm, four times over."""
    from pagespec.kernels.fused.rms_norm import add_rms_norm, rms_norm
    from pagespec.kernels.matmul.dispatch import linear
    from pagespec.kernels.moe.expert_rows import combine_add_rms_norm, combine_experts
    from pagespec.kernels.moe.grouped_mm import grouped_mm
    from pagespec.kernels.moe.route_rows import route_rows

    num_experts, top_k, hidden_size, inner = 128, 8, 1024, 384
    router = normal(num_experts, hidden_size, seed=1) / 32
    norm_weight = normal(hidden_size, seed=2)
    gate_up = (normal(num_experts, 2 * inner, hidden_size, seed=3) / 32).transpose(1, 2)
    down = (normal(num_experts, hidden_size, inner, seed=4) / 16).transpose(1, 2)
    shared = normal(hidden_size, hidden_size, seed=5) / 32
    merged = normal(64, hidden_size, seed=6) / 32  # a column of what it makes is the gate
    starts = starts_of(num_real)
    real = slice(0, num_real)

    def chain(hidden: Tensor) -> Tensor:
        x = rms_norm(hidden, norm_weight, 1e-6, "rounded")
        for _ in range(4):
            logits = linear(x, router, None, 64)
            rows, weights, inverse, offs = route_rows(
                logits, x, top_k, "renormalised", x.dtype, starts
            )
            rows = grouped_mm(rows, gate_up, offs, has_gate=True)
            rows = grouped_mm(rows, down, offs, has_old_offs=True)
            gate = linear(x, merged, None, 64)[:, 3:4]
            added = linear(x, shared, None, 64)
            x, hidden = combine_add_rms_norm(
                rows, weights.view(-1), inverse, top_k, hidden, norm_weight, 1e-6, "rounded",
                added, gate,
            )  # fmt: skip
        return x

    def waiting(hidden: Tensor) -> Tensor:
        wait = torch.cuda.synchronize
        x = rms_norm(hidden, norm_weight, 1e-6, "rounded")
        for _ in range(4):
            wait()
            logits = linear(x, router, None, 64)
            wait()
            rows, weights, inverse, offs = route_apart(logits, x, top_k, "renormalised", starts)
            wait()
            rows = grouped_mm(rows, gate_up, offs, has_gate=True)
            wait()
            rows = grouped_mm(rows, down, offs)
            wait()
            gate = linear(x, merged, None, 64)[:, 3:4]
            wait()
            added = linear(x, shared, None, 64)
            wait()
            summed = combine_experts(rows, weights.view(-1), inverse, top_k, x.dtype, added, gate)
            wait()
            x, hidden = add_rms_norm(summed, hidden, norm_weight, 1e-6, "rounded")
        wait()
        return x

    given = normal(num_tokens, hidden_size)
    chain(given)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = chain(given)
    for seed in range(30):
        given.copy_(normal(num_tokens, hidden_size, seed=seed))
        graph.replay()
        assert torch.equal(out[real], waiting(given.clone())[real]), seed
        # Alone, without padding.
        assert torch.equal(out[:1], waiting(given[:1].clone())), seed
    assert out[real].isfinite().all()
