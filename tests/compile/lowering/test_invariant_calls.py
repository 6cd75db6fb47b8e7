"""Matmuls with a constant, in every spelling: the bits of a row do not depend on other rows."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.fx import GraphModule, Interpreter, Node, symbolic_trace

from pagespec.compile.captured_model import CaptureOptions, capture_model
from pagespec.compile.fx.check_graph import Bindings, verify_graph
from pagespec.compile.fx.nodes import is_ours
from pagespec.compile.load.load import load_model
from pagespec.compile.lowering.lower_cpu import lower_cpu
from pagespec.compile.passes import PassContext, run_passes
from pagespec.compile.passes.write_as_linear import write_as_linear
from pagespec.compile.probe.probe import probe_model
from tests.support.captures import graph_cache
from tests.support.models import tiny_model

Function = Callable[[Tensor, Tensor], Tensor]
# Inputs that 16 does not divide, more than one vector of them, and outputs likewise.
K, N, E = 72, 200, 3
ROWS = (*range(1, 71), 100, 129)


class Case(NamedTuple):
    """Sizes of ``x``, of which the rows are -1; where the result has them; sizes of the constant;
    and whether the constant is written as that of ``linear``."""

    function: Function
    x: tuple[int, ...]
    rows_at: int
    weight: tuple[int, ...]
    is_linear: bool = False


CASES = {
    "x @ w.T": Case(lambda x, w: x @ w.T, (1, -1, K), 1, (N, K), True),
    "x @ w.t()": Case(lambda x, w: x @ w.t(), (1, -1, K), 1, (N, K), True),
    "w.mT": Case(lambda x, w: torch.matmul(x, w.mT), (-1, K), 0, (N, K), True),
    "transpose": Case(lambda x, w: x.matmul(w.transpose(-1, 0)), (1, -1, K), 1, (N, K), True),
    "permute": Case(lambda x, w: torch.mm(x, w.permute(1, 0)), (-1, K), 0, (N, K), True),
    "as stored": Case(lambda x, w: x @ w.permute(0, 1), (1, -1, K), 1, (K, K)),
    "x @ w": Case(lambda x, w: x @ w, (1, -1, K), 1, (K, N)),
    "one of several": Case(lambda x, w: x @ w[1], (-1, K), 0, (E, K, N)),
    "several joined": Case(
        lambda x, w: x @ torch.cat([w[0], w[2]], dim=1), (1, -1, K), 1, (E, K, N)
    ),
    "one column": Case(lambda x, w: x @ w, (1, -1, K), 1, (K, 1)),
    "a vector": Case(lambda x, w: x @ w, (1, -1, K), 1, (K,)),
    "mv": Case(lambda x, w: torch.mv(x, w), (-1, K), 0, (K,)),
    "bmm": Case(lambda x, w: torch.bmm(x, w), (E, -1, K), 1, (E, K, N)),
    "x.bmm(w.mT)": Case(lambda x, w: x.bmm(w.transpose(1, 2)), (E, -1, K), 1, (E, N, K)),
    "one x for all": Case(lambda x, w: x @ w, (1, -1, K), 1, (E, K, N)),
    "one w for all": Case(lambda x, w: x @ w, (E, -1, K), 1, (1, K, N)),
    "w @ x": Case(lambda x, w: w @ x, (1, K, -1), 2, (N, K)),
    "batch of w @ x": Case(lambda x, w: torch.matmul(w, x), (E, K, -1), 2, (E, N, K)),
    "einsum linear": Case(
        lambda x, w: torch.einsum("b t k, n k -> b t n", x, w), (1, -1, K), 1, (N, K), True
    ),
    "einsum": Case(lambda x, w: torch.einsum("btk,kn->btn", x, w), (1, -1, K), 1, (K, N)),
    "einsum, dots": Case(lambda x, w: torch.einsum("...k,kn->...n", [x, w]), (1, -1, K), 1, (K, N)),
    "einsum, no arrow": Case(lambda x, w: torch.einsum("btk,kn", x, w), (1, -1, K), 2, (K, N)),
    "einsum, heads": Case(
        lambda x, w: torch.einsum("bthk,hkn->bthn", x, w), (1, -1, E, K), 1, (E, K, N)
    ),
    "einsum, turned": Case(
        lambda x, w: torch.einsum("hnk,bthk->bhnt", w, x), (1, -1, E, K), 3, (E, N, K)
    ),
    "einsum, two sums": Case(
        lambda x, w: torch.einsum("bthd,hdn->btn", x, w), (1, -1, E, 24), 1, (E, 24, N)
    ),
    "einsum, two of its own": Case(
        lambda x, w: torch.einsum("btk,khd->bthd", x, w).transpose(1, 2), (1, -1, K), 2, (K, 5, 8)
    ),
    "cast": Case(lambda x, w: x.float() @ w.to(torch.float32), (1, -1, K), 1, (K, N)),
}
ADDENDS: dict[str, Case] = {
    "addmm": Case(lambda x, w: torch.addmm(w[0], x, w), (-1, K), 0, (K, N)),
    "baddbmm": Case(lambda x, w: torch.baddbmm(w[:, :1], x, w), (E, -1, K), 1, (E, K, N)),
    "addmm of a transpose": Case(
        lambda x, w: torch.addmm(w.t()[0], x, w.t()), (-1, K), 0, (N, K), True
    ),
}


def tensor(sizes: tuple[int, ...], num_rows: int, dtype: torch.dtype) -> Tensor:
    return torch.randn([num_rows if size == -1 else size for size in sizes]).to(dtype)


def traced(function: Function, x: Tensor, weight: Tensor) -> GraphModule:
    gm = symbolic_trace(lambda x, w: function(x, w))

    class Recorder(Interpreter):
        def run_node(self, n: Node) -> Any:
            n.meta["example_value"] = value = super().run_node(n)
            return value

    Recorder(gm).run(x, weight)
    return gm


def lowered(
    function: Function, x: Tensor, weight: Tensor, room: int
) -> tuple[GraphModule, Callable[[Tensor], Tensor]]:
    """The graph after the passes, and a function of ``x``."""
    gm = traced(function, x, weight)
    context = PassContext(nn.Module(), {"w": weight}, packing_bytes=room)
    run_passes(gm, context, {"write_as_linear": write_as_linear, "lower_cpu": lower_cpu})
    names = [node.name for node in gm.graph.find_nodes(op="placeholder")]
    verify_graph(gm, "cpu", Bindings(context.constants, {"x": x}))
    return gm, lambda x: gm(*(x if name == "x" else context.constants[name] for name in names))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", [*CASES, *ADDENDS])
def test_a_row_has_the_same_bits_among_any_others(name: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    case = (CASES | ADDENDS)[name]
    weight, many = tensor(case.weight, 0, dtype), tensor(case.x, max(ROWS), dtype)
    expected = case.function(many.double(), weight.double()).double()
    at = case.x.index(-1)
    for room in (0, 1 << 20):
        # Traced with another number of rows than it is run with.
        gm, function = lowered(case.function, tensor(case.x, 7, dtype), weight, room)
        ours = [node for node in gm.graph.nodes if is_ours(node)]
        assert len(ours) == 1, gm.graph
        is_packed = any("packed" in node.name for node in gm.graph.nodes)
        has_onednn = torch.backends.mkldnn.is_available()
        is_float32 = dtype == torch.float32 or name == "cast"
        assert is_packed == (bool(room) and is_float32 and has_onednn)
        whole = function(many)
        assert whole.dtype == case.function(many, weight).dtype
        tolerance = 2e-4 if is_float32 else 0.05
        torch.testing.assert_close(whole.double(), expected, rtol=tolerance, atol=20 * tolerance)
        for i, count in enumerate(ROWS):
            first = (5 * i) % (max(ROWS) - count + 1)
            part = function(many.narrow(at, first, count))
            assert torch.equal(part, whole.narrow(case.rows_at, first, count)), (count, room)
        assert function(many.narrow(at, 0, 0)).shape[case.rows_at] == 0


@pytest.mark.parametrize("name", [*CASES, *ADDENDS])
def test_what_linear_computes_is_written_so(name: str) -> None:
    case = (CASES | ADDENDS)[name]
    x, weight = tensor(case.x, 7, torch.float32), tensor(case.weight, 0, torch.float32)
    gm = traced(case.function, x, weight)
    count = write_as_linear(gm, PassContext(nn.Module(), {"w": weight}))
    gm.recompile()
    linears = [node for node in gm.graph.nodes if node.target is F.linear]
    assert count == len(linears) == case.is_linear
    if linears:
        assert linears[0].args[1].op == "placeholder"
        torch.testing.assert_close(gm(x, weight), case.function(x, weight))


def test_views_of_a_result_that_torch_lays_out_otherwise() -> None:
    x, weight = torch.randn(1, 9, E, K), torch.randn(E, K, N)

    def function(x: Tensor, w: Tensor) -> Tensor:
        product = torch.einsum("bthk,hkn->bthn", x, w)
        return product.permute(2, 0, 1, 3).view(E, 9, N) + 1

    assert function(x, weight).shape == (E, 9, N)
    _, lowered_function = lowered(lambda x, w: function(x, w), x, weight, 0)
    torch.testing.assert_close(lowered_function(x), function(x, weight), rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize(
    "function",
    [
        lambda x, w: x @ x.transpose(1, 2),
        lambda x, w: x + (w @ w.mT)[0],
        lambda x, w: x[..., :1] @ w[:1],
        lambda x, w: x[..., None] * w[:, 0],
        lambda x, w: torch.einsum("btk,kk->btk", x, w[:, :K]),
        lambda x, w: torch.einsum("btk,kn->bt", x, w),
        lambda x, w: torch.einsum("btk,btj,kn->jn", x, x, w),
    ],
    ids=["two of the step", "constants", "one term", "no matmul", "diagonal", "sum", "three"],
)
def test_others_stay_what_they_are(function: Function) -> None:
    torch.manual_seed(0)
    x, weight = torch.randn(1, 9, K), torch.randn(K, N)
    gm, lowered_function = lowered(function, x, weight, 1 << 20)
    assert not any(is_ours(node) for node in gm.graph.nodes)
    assert torch.equal(lowered_function(x), function(x, weight))


@pytest.mark.parametrize(("arch", "num_packed"), [("falcon", 7), ("llama4_text", 21)])
def test_of_models_all_are_ours_and_packed_once(arch: str, num_packed: int) -> None:
    """The head and two layers. Falcon: q, k and v with the first of the MLP, which reads the same
    rows, and two others. Llama 4: two of attention; the router with gate and up of the shared
    expert, its last, and two of each of three experts."""
    model = tiny_model(arch, **({} if arch == "falcon" else {"num_local_experts": E}))
    loaded = load_model(model)
    captured = capture_model(
        loaded,
        probe_model(loaded),
        CaptureOptions(packing_bytes=1 << 30),
        graph_cache=graph_cache(),
    )
    assert captured.graph is not None
    names = [node.name for node in captured.graph.graph.find_nodes(op="placeholder")]
    places = dict(zip(names, captured.sources, strict=True))
    constants = {name: s[1] for name, s in places.items() if s[0] == "constant"}
    others = {name: s[1] for name, s in places.items() if s[0] != "constant"}
    verify_graph(captured.graph, "cpu", Bindings(constants, others))
    if torch.backends.mkldnn.is_available():
        assert sum(name.startswith("packed_") for name in names) == num_packed
    matmuls = (operator.matmul, torch.matmul, torch.bmm, torch.mm)
    assert not any(node.target in matmuls for node in captured.graph.graph.nodes)
