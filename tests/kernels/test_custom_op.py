"""Custom ops defined by an annotated function: schema, call, graph, gradient."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from pagespec.kernels import ops  # noqa: F401 - defines pagespec's ops
from pagespec.kernels.custom_op import custom_op
from pagespec.kernels.recurrent import ops as recurrent_ops  # noqa: F401


class Pair(NamedTuple):
    x: Tensor
    y: Tensor


class Form(NamedTuple):
    factor: float
    shift: int = 0
    third: Tensor | None = None


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
    return grad * ctx.factor, None


def _remember_factor(ctx: Any, inputs: tuple[Tensor, int], output: Tensor) -> None:
    ctx.factor = inputs[1]


@pytest.fixture(scope="module")
def scaled() -> Callable[[Tensor, int], Tensor]:
    @custom_op(
        fake=lambda x, factor=2: torch.empty_like(x),
        backward=_backward,
        setup_context=_remember_factor,
    )
    def test_only_scaled(x: Tensor, factor: int = 2) -> Tensor:
        """x times a factor."""
        return x * factor

    return test_only_scaled


def test_schemas_follow_from_annotations(scaled: Callable[..., Tensor]) -> None:
    found = str(torch.ops.pagespec.test_only_scaled.default._schema)
    assert found == "pagespec::test_only_scaled(Tensor x, int factor=2) -> Tensor"
    assert scaled.__doc__ == "x times a factor."
    mutated = {
        argument.name
        for op in ("kv_store", "index_topk", "delta_rule", "paged_attention", "all_gather")
        for argument in getattr(torch.ops.pagespec, op).default._schema.arguments
        if argument.alias_info is not None and argument.alias_info.is_write
    }
    assert mutated == {"k_cache", "v_cache", "cache", "states"}


def test_a_call_is_a_node_of_the_graph(scaled: Callable[..., Tensor]) -> None:
    targets: list[object] = []

    def keep(module: torch.fx.GraphModule, _: object) -> Callable[..., Any]:
        targets.extend(n.target for n in module.graph.nodes if n.op == "call_function")
        return module.forward

    x = torch.arange(3.0)
    compiled = torch.compile(lambda x: scaled(x, 3), backend=keep, fullgraph=True)
    assert torch.equal(compiled(x), x * 3)
    assert len(targets) == 1
    assert "test_only_scaled" in str(targets[0])


def test_an_op_with_a_backward_has_a_gradient(scaled: Callable[..., Tensor]) -> None:
    x = torch.ones(3, requires_grad=True)
    scaled(x, 5).sum().backward()
    assert x.grad is not None
    assert torch.equal(x.grad, torch.full((3,), 5.0))


def test_fields_of_bundles_are_the_parameters_of_an_op() -> None:
    @custom_op(fake=lambda pair, form: pair.y.new_empty(pair.y.shape, dtype=torch.float64))
    def test_only_joined(pair: Pair, form: Form) -> Tensor:
        total = pair.x * form.factor + pair.y + form.shift
        return total.double() if form.third is None else total.double() + form.third

    op = torch.ops.pagespec.test_only_joined
    assert str(op.default._schema) == (
        "pagespec::test_only_joined(Tensor x, Tensor y, float factor, int shift=0, "
        "Tensor? third=None) -> Tensor"
    )
    x, y = torch.arange(3.0), torch.ones(3)
    assert test_only_joined(x, y, 2.0).tolist() == [1.0, 3.0, 5.0]
    assert op(x, y, 2.0, third=x).tolist() == [1.0, 4.0, 7.0]
    assert op(x, y, 2.0, 0, x).tolist() == [1.0, 4.0, 7.0]
    assert op(x, y=y, factor=2.0, shift=5).tolist() == [6.0, 8.0, 10.0]
    fakes = op(x.to("meta"), y.to("meta"), 2.0)
    assert (fakes.shape, fakes.dtype) == ((3,), torch.float64)
