"""Routing, copies to experts and sums over experts on a GPU: against torch, and in CUDA graphs."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

pytestmark = pytest.mark.gpu

SHAPES = [(1, 8, 2048), (64, 8, 2048), (65, 2, 4096), (3, 10, 300), (1, 1, 7), (8192, 8, 2048)]


def normal(*shape: int, dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> Tensor:
    generator = torch.Generator("cuda").manual_seed(seed)
    return torch.randn(shape, generator=generator, device="cuda").to(dtype)


def permutation(num_rows: int) -> tuple[Tensor, Tensor]:
    """An order and its inverse."""
    order = torch.randperm(num_rows, device="cuda")
    return order, torch.argsort(order)


def in_order(products: Tensor) -> Tensor:
    """The sum of ``[T, k, H]`` over k, one addition after the other."""
    total = torch.zeros_like(products[:, 0], dtype=torch.float32)
    for j in range(products.shape[1]):
        total = total + products[:, j]
    return total.to(products.dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("normalisation", ["all", "renormalised"])
@pytest.mark.parametrize("num_tokens", [1, 5, 300])
@pytest.mark.parametrize(
    ("num_experts", "top_k"), [(128, 8), (512, 10), (60, 4), (8, 2), (1024, 16), (1, 1)]
)
def test_routes_as_torch(
    num_experts: int, top_k: int, num_tokens: int, normalisation: str, dtype: torch.dtype
) -> None:
    from pagespec.kernels.moe.route import route

    logits = normal(num_tokens, num_experts, dtype=dtype)
    weights, ids = route(logits, top_k, normalisation, dtype)
    probabilities = torch.softmax(logits, -1, dtype=torch.float32)
    expected = torch.topk(probabilities, top_k)[0]
    # Neither softmax adds in the other's order: what is chosen is among the largest up to that.
    torch.testing.assert_close(probabilities.gather(1, ids), expected, rtol=2e-6, atol=0)
    if normalisation == "renormalised":
        expected = expected / expected.sum(-1, keepdim=True)
    eps = torch.finfo(dtype).eps
    torch.testing.assert_close(weights, expected.to(dtype), rtol=max(4e-6, eps), atol=0)
    assert all(len(set(row)) == top_k for row in ids.tolist())
    equal = weights[:, 1:] == weights[:, :-1]
    if dtype == torch.float32 and normalisation == "all":
        assert (ids[:, 1:] > ids[:, :-1])[equal].all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("num_tokens", [1, 5, 300])
@pytest.mark.parametrize(
    ("num_experts", "top_k"), [(64, 8), (72, 10), (32, 4), (60, 1), (1024, 16), (1, 1)]
)
def test_softmax_over_the_chosen_is_that_of_torch(
    num_experts: int, top_k: int, num_tokens: int, dtype: torch.dtype
) -> None:
    """Granite's and GPT-OSS's order. Which are chosen is a matter of logits alone, so exact."""
    from pagespec.kernels.moe.route import route

    logits = normal(num_tokens, num_experts, dtype=dtype)
    logits[-1, : num_experts // 2] = 0.0
    logits[-1, ::3] = -0.0
    wide = torch.full((num_tokens, num_experts + 10), float("nan"), dtype=dtype, device="cuda")
    wide[:, 3:-7] = logits
    values, expected_ids = torch.sort(logits, dim=-1, descending=True, stable=True)
    expected = torch.softmax(values[:, :top_k], -1)
    weights, ids = route(logits, top_k, "chosen", dtype)
    assert torch.equal(ids, expected_ids[:, :top_k])
    torch.testing.assert_close(weights, expected, rtol=max(1e-6, torch.finfo(dtype).eps), atol=0)
    strided = route(wide[:, 3:-7], top_k, "chosen", dtype)
    assert torch.equal(strided[0], weights)
    assert torch.equal(strided[1], ids)


@pytest.mark.parametrize("normalisation", ["renormalised", "chosen"])
def test_every_id_is_an_experts(normalisation: str) -> None:
    from pagespec.kernels.moe.route import route

    logits = normal(3, 128)
    logits[0, 7], logits[1], logits[2] = float("nan"), float("inf"), float("-inf")
    _, ids = route(logits, 8, normalisation, torch.bfloat16)
    assert ((ids >= 0) & (ids < 128)).all()
    assert all(len(set(row)) == 8 for row in ids.tolist())


@pytest.mark.parametrize(("num_tokens", "top_k", "hidden_size"), SHAPES)
@pytest.mark.parametrize(
    ("rows_dtype", "weights_dtype", "dtype"),
    [
        (torch.bfloat16, torch.bfloat16, torch.bfloat16),
        (torch.bfloat16, torch.float32, torch.bfloat16),
        (torch.float16, torch.float16, torch.float16),
        (torch.float32, torch.float32, torch.float32),
    ],
)
def test_rows_go_to_experts_and_sums_come_back(
    num_tokens: int,
    top_k: int,
    hidden_size: int,
    rows_dtype: torch.dtype,
    weights_dtype: torch.dtype,
    dtype: torch.dtype,
) -> None:
    from pagespec.kernels.moe.expert_rows import combine_experts, spread_rows

    order, inverse = permutation(num_tokens * top_k)
    tokens = normal(num_tokens, hidden_size, dtype=rows_dtype)
    rows = spread_rows(tokens, inverse, top_k)
    assert torch.equal(rows, tokens[order // top_k])
    rows = normal(num_tokens * top_k, hidden_size, dtype=rows_dtype, seed=1)
    weights = normal(num_tokens * top_k, dtype=weights_dtype, seed=2)
    found = combine_experts(rows, weights, inverse, top_k, dtype)
    products = (rows * weights[order].unsqueeze(-1))[inverse].view(-1, top_k, hidden_size)
    assert torch.equal(found, in_order(products).to(dtype))
    # Torch's own, whose additions may come in another order.
    tolerance = {torch.float32: 1e-5, torch.bfloat16: 1.6e-2, torch.float16: 2e-3}[dtype]
    torch.testing.assert_close(
        found, products.sum(1).to(dtype), atol=tolerance * top_k, rtol=tolerance
    )


def test_a_token_has_its_bits_alone_and_in_any_company() -> None:
    from pagespec.kernels.moe.expert_rows import combine_experts
    from pagespec.kernels.moe.route import route

    logits = normal(700, 128)
    rows, weights = normal(700 * 8, 2048), normal(700 * 8, dtype=torch.float32, seed=1)
    places = torch.arange(700 * 8, device="cuda")
    routed = route(logits, 8, "renormalised", torch.bfloat16)
    whole = combine_experts(rows, weights, places, 8, torch.bfloat16)
    for begin, end in [(0, 1), (699, 700), (3, 60), (100, 165)]:
        for found, expected in zip(
            route(logits[begin:end], 8, "renormalised", torch.bfloat16), routed, strict=True
        ):
            assert torch.equal(found, expected[begin:end])
        at = slice(begin * 8, end * 8)
        found = combine_experts(
            rows[at], weights[at], places[: (end - begin) * 8], 8, torch.bfloat16
        )
        assert torch.equal(found, whole[begin:end])


@pytest.mark.parametrize("num_tokens", [1, 8, 300])
def test_a_captured_chain_waits_for_what_it_reads(num_tokens: int) -> None:
    """Each kernel may start before the one it follows has ended."""
    from pagespec.kernels.moe.expert_rows import combine_experts, spread_rows
    from pagespec.kernels.moe.grouped_mm import grouped_mm
    from pagespec.kernels.moe.route import route
    from pagespec.kernels.moe.sort_by_expert import sort_by_expert

    num_experts, top_k, hidden_size = 16, 4, 256
    router = normal(num_experts, hidden_size, seed=1) / 16
    experts = (normal(num_experts, hidden_size, hidden_size, seed=2) / 16).transpose(1, 2)

    def chain(x: Tensor, wait: bool) -> Tensor:
        def settle() -> None:
            if wait:
                torch.cuda.synchronize()

        for _ in range(4):
            logits = torch.nn.functional.linear(x, router)
            weights, ids = route(logits, top_k, "renormalised", x.dtype)
            settle()
            _, _, inverse, offs = sort_by_expert(ids.view(-1), num_experts)
            settle()
            rows = spread_rows(x, inverse, top_k)
            settle()
            rows = grouped_mm(rows, experts, offs)
            settle()
            x = combine_experts(rows, weights.view(-1), inverse, top_k, x.dtype)
            settle()
            x = x / x.float().square().mean(1, keepdim=True).sqrt().to(x.dtype)
        return x

    given = normal(num_tokens, hidden_size)
    chain(given, True)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = chain(given, False)
    for seed in range(20):
        given.copy_(normal(num_tokens, hidden_size, seed=seed))
        graph.replay()
        assert torch.equal(out, chain(given.clone(), True)), seed
    assert out.isfinite().all()
