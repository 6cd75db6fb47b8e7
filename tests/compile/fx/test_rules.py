"""Graph rules: their matches, where the replacement is inserted, and what they leave unchanged."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.fx import GraphModule, Node, symbolic_trace

from pagespec.compile.fx.nodes import example
from pagespec.compile.fx.pass_context import PassContext
from pagespec.compile.fx.rules import (
    MISSING,
    Cast,
    Chain,
    Match,
    Named,
    ReadBy,
    Rest,
    Rule,
    Slice,
    Value,
    Where,
    call,
    one_of,
    product,
    same_dtype,
    same_shape,
    values,
)


def fused(x: Tensor, y: Tensor) -> Tensor:
    return torch.relu(x) * y


def both(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    return torch.sin(x), torch.cos(y)


RELU_MUL = Rule(
    product(call("relu", args=values("x")), Value("y")),
    lambda m: m.call(fused, m["x"], m["y"]),
    guards=(same_shape("x", "y"), same_dtype("x", "y")),
)


def graph_of(function: Callable[..., object], *inputs: Tensor) -> GraphModule:
    """The graph of a function, each node with the value that it has for ``inputs``."""
    gm = symbolic_trace(function)

    class Record(torch.fx.Interpreter):
        def run_node(self, n: Node) -> object:
            # Views and writes in place change what was recorded; shapes and dtypes are kept.
            result = super().run_node(n)
            n.meta["example_value"] = result
            return result

    Record(gm).run(*(tensor.clone() for tensor in inputs))
    return gm


def rewritten(function: Callable[..., object], rule: Rule, *inputs: Tensor) -> tuple[int, list]:
    """The number of rewrites and the targets left; the results are compared."""
    gm = graph_of(function, *inputs)
    expected = gm(*(tensor.clone() for tensor in inputs))
    count = rule(gm, PassContext(nn.Module(), {}))
    gm.graph.lint()
    gm.recompile()
    torch.testing.assert_close(gm(*(tensor.clone() for tensor in inputs)), expected)
    assert all(example(node) is not None for node in gm.graph.nodes if node.op == "call_function")
    return count, [node.target for node in gm.graph.nodes if node.op.startswith("call")]


X, Y = torch.randn(3, 4), torch.randn(3, 4)


@pytest.mark.parametrize(
    "function", [lambda x, y: torch.relu(x) * y, lambda x, y: y * torch.relu(x)]
)
def test_a_product_matches_in_either_order(function: Callable[..., object]) -> None:
    assert rewritten(function, RELU_MUL, X, Y) == (1, [fused])


def _shared(x: Tensor, y: Tensor) -> Tensor:
    a = torch.relu(x)
    return a * y + a


def _source_written(x: Tensor, y: Tensor) -> Tensor:
    a = torch.relu(x)
    x.add_(1)
    return a * y


def _view_of_source_written(x: Tensor, y: Tensor) -> Tensor:
    a = torch.relu(x)
    x.view(-1).mul_(2)
    return a * y


def _inner_written(x: Tensor, y: Tensor) -> Tensor:
    a = torch.relu(x)
    a.add_(1)
    return a * y


def _no_node(x: Tensor, y: Tensor) -> Tensor:
    return torch.relu(x) * 2.0 + y


@pytest.mark.parametrize(
    "function", [_shared, _source_written, _view_of_source_written, _inner_written, _no_node]
)
def test_near_misses_are_left(function: Callable[..., object]) -> None:
    count, targets = rewritten(function, RELU_MUL, X, Y)
    assert count == 0
    assert fused not in targets


def test_what_the_root_itself_reads_may_be_written_before() -> None:
    def function(x: Tensor, y: Tensor) -> Tensor:
        a = torch.relu(x)
        y.view(-1).mul_(2)
        return a * y

    assert rewritten(function, RELU_MUL, X, Y)[0] == 1


@pytest.mark.parametrize("y", [torch.randn(4), Y.double()], ids=["broadcast", "dtype"])
def test_a_guard_refuses_shapes_and_dtypes(y: Tensor) -> None:
    assert rewritten(lambda x, y: torch.relu(x) * y, RELU_MUL, X, y)[0] == 0


def test_a_result_that_is_written_later_is_still_replaced() -> None:
    def function(x: Tensor, y: Tensor) -> Tensor:
        out = torch.relu(x) * y
        out.add_(1)
        return out

    assert rewritten(function, RELU_MUL, X, Y)[0] == 1


def test_every_match_is_rewritten_even_of_a_rewritten_source() -> None:
    count, targets = rewritten(lambda x, y: torch.relu(torch.relu(x) * y) * y, RELU_MUL, X, Y)
    assert (count, targets) == (2, [fused, fused])


def test_a_shared_node_stays_for_others() -> None:
    rule = Rule(
        product(call("relu", args=values("x"), is_shared=True), Value("y")),
        RELU_MUL.replace,
    )
    count, targets = rewritten(_shared, rule, X, Y)
    assert (count, targets[0], targets[1]) == (1, torch.relu, fused)


def test_alternatives_are_tried_until_the_guards_hold() -> None:
    source = one_of(call("reshape", args=(Value("source"), Rest("sizes"))), Value("source"))

    def doubled(source: Tensor) -> Tensor:
        return source * 2

    rule = Rule(
        product(source, 2),  # type: ignore[arg-type]
        lambda m: m.call(doubled, m["source"]),
        guards=(lambda m: m["source"].meta["example_value"].dim() == 1,),
    )
    # The reshape is looked through only where its source passes the guard.
    assert rewritten(lambda x: x.reshape(-1) * 2, rule, X)[1] == ["reshape", doubled]
    count, targets = rewritten(lambda x: x.reshape(-1) * 2, rule, X[0])
    assert (count, targets) == (1, [doubled])


def test_one_name_is_one_value() -> None:
    rule = Rule(
        call("add", args=(call("relu", args=values("x")), Value("x"))),
        lambda m: m.call(fused, m["x"], m["x"]),
    )
    gm = graph_of(lambda x, y: torch.relu(x) + y, X, Y)
    assert rule(gm, PassContext(nn.Module(), {})) == 0
    gm = graph_of(lambda x, y: torch.relu(x) + x, X, Y)
    assert rule(gm, PassContext(nn.Module(), {})) == 1


def test_casts_are_found_by_what_they_do() -> None:
    rule = Rule(
        Cast(call("relu", args=values("x"))), lambda m: m.call(torch.nn.functional.silu, m["x"])
    )
    for cast in (lambda x: torch.relu(x).bfloat16(), lambda x: torch.relu(x).to(torch.float64)):
        assert rule(graph_of(cast, X), PassContext(nn.Module(), {})) == 1
    to_device = graph_of(lambda x: torch.relu(x).neg(), X)
    assert rule(to_device, PassContext(nn.Module(), {})) == 0


def test_several_results_have_a_record_each() -> None:
    def pair(m: Match) -> dict[Node, Node]:
        made = m.call(both, m["x"], m["y"])
        return m.results(made, m["sin"], m["cos"])

    rule = Rule(
        call("add", args=(call("sin", args=values("x"), name="sin", is_shared=True),
                          call("cos", args=values("y"), name="cos", is_shared=True))),
        pair,
        at="sin",
    )  # fmt: skip
    gm = graph_of(lambda x, y: torch.sin(x) + torch.cos(y), X, Y)
    assert rule(gm, PassContext(nn.Module(), {})) == 1
    gm.graph.lint()
    gm.recompile()
    torch.testing.assert_close(gm(X, Y), torch.sin(X) + torch.cos(Y))
    parts = [node for node in gm.graph.nodes if node.name.startswith("getitem")]
    assert [example(node) is not None for node in parts] == [True, True]


def identity(x: Tensor) -> Tensor:
    return x.clone()


@pytest.mark.parametrize(
    ("function", "count"),
    [
        (lambda x: x.sum(-1, keepdim=True), 1),
        (lambda x: x.sum(dim=-1, keepdim=True), 1),
        (lambda x: x.sum(-1, True), 1),
        (lambda x: x.sum(-1), 0),
        (lambda x: x.sum(-1, keepdim=False), 0),
        (lambda x: x.sum(0, keepdim=True), 0),
        (lambda x: x.sum(-1, keepdim=True, dtype=torch.float64), 0),
        (lambda x: x.sum(-1, True, dtype=None), 0),
        (lambda x: torch.sum(x, -1, True), 1),
    ],
)
def test_options_are_positional_or_named(function: Callable[..., object], count: int) -> None:
    rule = Rule(
        call("sum", args=values("x"), dim=(-1, 1), keepdim=(True,)),
        lambda m: m.call(torch.mean, m["x"]),
    )
    assert rule(graph_of(function, X), PassContext(nn.Module(), {})) == count


def test_an_option_may_be_missing() -> None:
    rule = Rule(
        call("softmax", args=values("x"), dim=(-1,), dtype=(MISSING, None)),
        lambda m: m.call(identity, m["x"]),
    )
    for function, count in (
        (lambda x: torch.softmax(x, -1), 1),
        (lambda x: torch.softmax(x, dim=-1, dtype=None), 1),
        (lambda x: torch.softmax(x, -1, torch.float64), 0),
    ):
        assert rule(graph_of(function, X), PassContext(nn.Module(), {})) == count


def test_a_chain_has_any_number_of_calls_that_are_read_once() -> None:
    rule = Rule(
        call("neg", args=(Chain(call("relu", args=values("x")), ("view", "reshape")),)),
        lambda m: m.call(identity, m["x"]),
    )

    def read_between(x: Tensor) -> Tensor:
        flat = torch.relu(x).view(-1)
        return torch.neg(flat.reshape(4, 3)) + flat[0]

    for function, count in (
        (lambda x: torch.neg(torch.relu(x)), 1),
        (lambda x: torch.neg(torch.relu(x).view(-1).reshape(4, 3)), 1),
        (lambda x: torch.neg(torch.relu(x).t()), 0),
        (read_between, 0),
    ):
        assert rule(graph_of(function, X), PassContext(nn.Module(), {})) == count


def test_slices_of_the_last_dimension_are_found_in_each_spelling() -> None:
    halves = [Slice(Value("x"), "right"), Slice(Value("x"), "left")]
    rule = Rule(call("cat", args=(halves,), dim=(-1,)), lambda m: m.call(identity, m["x"]))

    def chunks(x: Tensor) -> Tensor:
        left, right = x.chunk(2, dim=-1)
        return torch.cat((right, left), dim=-1)

    def parts(x: Tensor) -> Tensor:
        left, right = x.split([1, 3], -1)
        return torch.cat([right, left], -1)

    def rows(x: Tensor) -> Tensor:
        left, right = x.split([1, 2])
        return torch.cat([right, left], -1)

    for function, count in (
        (lambda x: torch.cat((x[..., 2:], x[..., :2]), dim=-1), 1),
        (chunks, 1),
        (parts, 1),
        (lambda x: torch.cat((x[..., 2:], x[..., :2], x), dim=-1), 0),
        (lambda x: torch.cat((x[..., ::2], x[..., :2]), dim=-1), 0),
    ):
        gm = graph_of(function, X)
        assert rule(gm, PassContext(nn.Module(), {})) == count
        assert ("split" in str(gm.graph) or "chunk" in str(gm.graph)) is False
    gm = symbolic_trace(rows)
    for node in gm.graph.nodes:
        node.meta["example_value"] = X
    assert rule(gm, PassContext(nn.Module(), {})) == 0


def test_a_reader_of_a_source_is_part_of_a_match() -> None:
    """``sin`` and ``cos`` of one value become one call."""
    cos = call("cos", args=values("x"), name="cos", is_shared=True)
    rule = Rule(
        call("sin", args=(ReadBy(Value("x"), cos),)),
        lambda m: m.results(m.call(both, m["x"], m["x"]), m.root, m["cos"]),
        at="cos",
    )
    gm, context = graph_of(lambda x: torch.cos(x) + torch.sin(x), X), PassContext(nn.Module(), {})
    assert rule(gm, context) == 1
    gm.graph.lint()
    gm.recompile()
    torch.testing.assert_close(gm(X), torch.cos(X) + torch.sin(X))
    assert not {torch.sin, torch.cos} & {node.target for node in gm.graph.nodes}
    assert rule(graph_of(lambda x: torch.cos(x) + torch.sin(x + 1), X), context) == 0


def test_a_part_of_a_pattern_has_a_condition_and_a_name() -> None:
    shifted = Where(
        Named("shifted", call("add", args=(Value("x"), Value("by")))), lambda m: m["by"] > 1
    )
    rule = Rule(call("neg", args=(shifted,)), lambda m: m.call(identity, m["shifted"].args[0]))
    context = PassContext(nn.Module(), {})
    assert rule(graph_of(lambda x: torch.neg(x + 2), X), context) == 1
    assert rule(graph_of(lambda x: torch.neg(x + 1), X), context) == 0


def test_what_only_a_match_has_read_goes_unless_it_writes() -> None:
    rule = Rule(
        call("neg", args=values("y")), lambda m: m.call(identity, next(iter(m.graph.nodes)))
    )

    def pure(x: Tensor) -> Tensor:
        return torch.neg(torch.abs(torch.exp(x)).view(-1).cos())

    def writing(x: Tensor) -> Tensor:
        y = x.clone()
        return torch.neg(torch.abs(y.mul_(2)).cos()) + y

    gm, context = graph_of(pure, X), PassContext(nn.Module(), {})
    assert rule(gm, context) == 1
    assert [node.op for node in gm.graph.nodes] == ["placeholder", "call_function", "output"]
    gm = graph_of(writing, X)
    assert rule(gm, context) == 1
    gm.graph.lint()
    gm.recompile()
    assert {"abs", "cos"}.isdisjoint(node.name for node in gm.graph.nodes)
    torch.testing.assert_close(gm(X.clone()), 3 * X)
