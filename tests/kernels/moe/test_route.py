"""The router's kernel under Triton's interpreter, against torch's softmax and a stable sort."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")
from pagespec.kernels.jit.parallel_build import parallel_build
from pagespec.kernels.moe import route as kernel
from tests.kernels.moe.conftest import Skip

NORMALISATIONS = ["all", "renormalised", "chosen"]


def normal(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def routed(
    logits: Tensor, top_k: int, normalisation: str, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """The same by torch's operations; of what is compared, the lowest id first of equal ones."""
    compared = logits
    if normalisation != "chosen":
        compared = torch.softmax(logits, -1, dtype=torch.float32)
    weights, ids = torch.sort(compared, dim=-1, descending=True, stable=True)
    weights, ids = weights[..., :top_k], ids[..., :top_k]
    if normalisation == "renormalised":
        weights = weights / weights.sum(-1, keepdim=True)
    if normalisation == "chosen":
        # In their own dtype, as Granite's and GPT-OSS's are: rounded once.
        weights = torch.softmax(weights, -1)
    return weights.to(dtype), ids


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("normalisation", NORMALISATIONS)
@pytest.mark.parametrize(
    ("num_tokens", "num_experts", "top_k"),
    [(1, 128, 8), (7, 60, 4), (3, 1, 1), (5, 513, 16), (4, 8, 8), (33, 4, 1), (3, 72, 10)],
)
def test_weights_and_ids_are_those_of_torch(
    num_tokens: int, num_experts: int, top_k: int, normalisation: str, dtype: torch.dtype
) -> None:
    # In bfloat16 many logits are equal.
    logits = normal(num_tokens, num_experts, dtype=dtype)
    weights, ids = kernel.route(logits, top_k, normalisation, dtype)
    expected, expected_ids = routed(logits, top_k, normalisation, dtype)
    assert ids.dtype == torch.int64
    assert torch.equal(ids, expected_ids)
    assert weights.dtype == dtype
    # A step of the dtype: where sums are rounded, so are their quotients.
    torch.testing.assert_close(weights, expected, rtol=max(1e-6, torch.finfo(dtype).eps), atol=0)


def test_of_equal_probabilities_the_lowest_id_is_first() -> None:
    logits = torch.tensor([[1.0, 2.0, 1.0, 2.0, 1.0], [0.0] * 5])
    weights, ids = kernel.route(logits, 4, "all", torch.float32)
    assert ids.tolist() == [[1, 3, 0, 2], [0, 1, 2, 3]]
    assert torch.equal(weights[1], torch.full((4,), 0.2))


def test_of_equal_logits_the_lowest_id_is_first() -> None:
    """Negative ones too, and zeros of either sign."""
    logits = torch.tensor([[-1.0, -2.0, -1.0, -3.0, -2.0], [-0.0, 0.0, -0.0, 0.0, -1e-45]])
    weights, ids = kernel.route(logits, 4, "chosen", torch.float32)
    assert ids.tolist() == [[0, 2, 1, 4], [0, 1, 2, 3]]
    assert torch.equal(weights[1], torch.full((4,), 0.25))
    torch.testing.assert_close(weights[0], torch.softmax(torch.tensor([-1.0, -1, -2, -2]), -1))


def test_the_order_of_logits_is_not_that_of_their_probabilities() -> None:
    """Beside a large logit the probabilities of unequal ones are all 0, or equal."""
    logits = torch.tensor(
        [[-200.0, 0.0, -199.0, -150.0], [8.0, 8.0 - 2**-21, -20.0, -20.0 + 2**-19]]
    )
    _, ids = kernel.route(logits, 4, "chosen", torch.float32)
    assert ids.tolist() == [[1, 3, 2, 0], [0, 1, 3, 2]]
    _, ids = kernel.route(logits, 4, "renormalised", torch.float32)
    assert ids.tolist()[0] == [1, 0, 2, 3]


@pytest.mark.parametrize("normalisation", ["renormalised", "chosen"])
def test_a_row_has_its_bits_in_any_company_and_layout(normalisation: str) -> None:
    logits = normal(9, 60, dtype=torch.bfloat16)
    weights, ids = kernel.route(logits, 6, normalisation, torch.float32)
    wide = torch.full((9, 70), float("nan"), dtype=torch.bfloat16)
    wide[:, 3:63] = logits
    for found, rows in [
        (kernel.route(logits[4:5], 6, normalisation, torch.float32), slice(4, 5)),
        (kernel.route(wide[:, 3:63], 6, normalisation, torch.float32), slice(None)),
        (kernel.route(logits.view(3, 3, 60), 6, normalisation, torch.float32), slice(None)),
    ]:
        assert torch.equal(found[0].view(-1, 6), weights[rows])
        assert torch.equal(found[1].view(-1, 6), ids[rows])


@pytest.mark.parametrize("normalisation", ["renormalised", "chosen"])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_every_id_is_an_experts(value: float, normalisation: str) -> None:
    """Ids are used as indices, so those of NaN and infinite logits must be in range too."""
    logits = normal(2, 60)
    logits[0, 7] = value
    logits[1] = value
    weights, ids = kernel.route(logits, 8, normalisation, torch.float32)
    assert ((ids >= 0) & (ids < 60)).all()
    assert all(len(set(row)) == 8 for row in ids.tolist())
    if value != float("-inf"):
        assert weights.isnan().all()
    if normalisation == "chosen":
        expected, expected_ids = routed(logits, 8, normalisation, torch.float32)
        assert torch.equal(ids, expected_ids)
        torch.testing.assert_close(weights, expected, equal_nan=True)


def test_nan_of_either_sign_is_chosen_first() -> None:
    logits = normal(1, 9)
    logits[0, 4:6] = torch.tensor([-0x400000, 0x7FC00000], dtype=torch.int32).view(torch.float32)
    _, ids = kernel.route(logits, 2, "chosen", torch.float32)
    assert ids.tolist() == [[4, 5]]


def test_no_tokens() -> None:
    weights, ids = kernel.route(normal(0, 8), 2, "renormalised", torch.bfloat16)
    assert weights.shape == ids.shape == (0, 2)


def test_results_of_a_skipped_launch_are_indices(skip_launches: Skip) -> None:
    skip_launches(kernel, "_route_kernel")
    with parallel_build(torch.device("cpu")):
        _, ids = kernel.route(normal(3, 8), 2, "renormalised", torch.float32)
    assert (ids == 0).all()
