"""A field that is declared as an input of the graph is traced, sent and read by kernels."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.fx import GraphModule

from pagespec.compile.capture.graph_cache import GraphCache
from pagespec.compile.captured_model import CapturedModel, CaptureOptions, capture_model
from pagespec.compile.fx.nodes import example
from pagespec.compile.load.load import load_model
from pagespec.compile.load.source import find_source
from pagespec.compile.model.current_step import current
from pagespec.compile.passes import PassContext
from pagespec.compile.probe.probe import probe_model
from pagespec.compile.start_record import StartRecord
from pagespec.compile.step_fields import FIELDS, LAST, Field, graph_inputs
from pagespec.engine.plan import StepPlan
from pagespec.engine.request import Request
from pagespec.engine.sampling_params import SamplingParams
from pagespec.runner.cpu.runner import ModelRunner
from tests.support.captures import change_common_passes
from tests.support.models import tiny_model

SLOTS = {"a": 3, "b": 1}
SLOT = Field(
    "adapter_slot",
    "row",
    lambda step: [SLOTS[r.request_id] for r in step.plan.requests],
    padding=-1,
    is_input=True,
)
EMBED_ROW = Field(
    "embed_row",
    "token",
    lambda step: [token % 4 - 1 for token in step.plan.token_ids],
    padding=-1,
    is_input=True,
)
AXES = Field(
    "rope_positions",
    "token",
    lambda step: np.stack([np.array(step.positions) + 100 * axis for axis in range(3)]),
    dtype=np.int64,
    is_input=True,
    width=3,
)
OTHERS = (
    Field("scale", "sample", lambda step: 0.5, dtype=np.float32, padding=LAST, is_input=True),
    Field("edges", "bound", lambda step: step.rows.query_starts, padding=LAST, is_input=True),
    Field("epoch", "step", lambda step: step.plan.step, is_input=True),
)
NEW = (SLOT, EMBED_ROW, AXES, *OTHERS)
SEEN: list[list[Any]] = []


@torch.library.custom_op("pagespec_toy::shift", mutates_args=())
def shift(
    x: Tensor, slot: Tensor, row: Tensor, axes: Tensor, scale: Tensor, edges: Tensor, epoch: Tensor
) -> Tensor:
    """A kernel that reads every new input. ``x``: ``[1, T, H]``."""
    SEEN.append([t.tolist() for t in (slot, row, axes, scale, edges, epoch)])
    found = x.clone()
    for place, value in enumerate(slot.tolist()):
        found[:, edges[place] : edges[place + 1]] += value
    return found


@shift.register_fake
def _(x: Tensor, *_: Tensor) -> Tensor:
    return torch.empty_like(x)


@contextmanager
def shifted(module: Any) -> Iterator[None]:
    """Inside the block, every MLP of a tiny Llama ends with the toy kernel."""
    parts = [layer.mlp for layer in module.model.layers]

    def shifting(plain: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
        def forward(x: Tensor) -> Tensor:
            assert current.step is not None
            inputs = current.step.inputs
            names = (field.name for field in NEW)
            return shift(plain(x), *(inputs.tensor(name) for name in names))

        return forward

    for part in parts:
        part.forward = shifting(part.forward)
    try:
        yield
    finally:
        for part in parts:
            del part.forward


def two_requests(step: int, lengths: tuple[int, int], starts: tuple[int, int]) -> StepPlan:
    infos = tuple(Request(n, [1, 2], SamplingParams(), max_num_tokens=9).info for n in "ab")
    return StepPlan(
        step=step,
        requests=infos,
        starts=starts,
        num_tokens=lengths,
        num_samples=(1, 1),
        token_ids=tuple(range(5, 5 + sum(lengths))),
        tables={0: (3,), 1: (9,)} if starts == (0, 0) else {},
        is_decode_only=lengths == (1, 1),
    )


def captured_with(
    mode: str, fields: tuple[Field, ...], *, num_layers: int = 1, cache: GraphCache | None = None
) -> CapturedModel:
    loaded = load_model(tiny_model("llama", num_hidden_layers=num_layers))
    specs = probe_model(loaded)
    with shifted(loaded.module):
        return capture_model(
            loaded, specs, CaptureOptions(compile=mode, fields=fields), graph_cache=cache
        )


def logits_of(captured: CapturedModel, plans: list[StepPlan]) -> list[Tensor]:
    """The logits of the sampled rows of each plan, computed by the runner."""
    found: list[Tensor] = []
    runner = ModelRunner(
        captured, block_size=8, num_blocks=12, on_logits=lambda _, x: found.append(x.clone())
    )
    SEEN.clear()
    for plan in plans:
        runner.collect(runner.dispatch(plan))
    return found


PLANS = [two_requests(0, (2, 3), (0, 0)), two_requests(7, (1, 1), (2, 3))]


@pytest.mark.parametrize("mode", ["graph", pytest.param("inductor", marks=pytest.mark.nightly)])
def test_a_declared_input_reaches_a_kernel_in_the_captured_graph(mode: str) -> None:
    captured = captured_with(mode, (*FIELDS, *NEW))
    logits = logits_of(captured, PLANS)
    assert SEEN == [
        [
            [3, 1],
            [0, 1, 2, -1, 0],
            [[0, 1, 0, 1, 2], [100, 101, 100, 101, 102], [200, 201, 200, 201, 202]],
            [0.5, 0.5],
            [0, 2, 5],
            [0],
        ],
        [[3, 1], [0, 1], [[2, 3], [102, 103], [202, 203]], [0.5, 0.5], [0, 1, 2], [7]],
    ]
    eager = captured_with("eager", (*FIELDS, *NEW))
    with shifted(eager.loaded.module):
        for one, other in zip(logits, logits_of(eager, PLANS), strict=True):
            torch.testing.assert_close(one, other)
    plain = load_model(tiny_model("llama", num_hidden_layers=1))
    unshifted = logits_of(capture_model(plain, probe_model(plain)), PLANS)
    assert not torch.allclose(logits[0], unshifted[0])


def test_padding_of_a_step_smaller_than_the_graph_takes() -> None:
    captured = captured_with("graph", (*FIELDS, *NEW))
    request = Request("b", [1], SamplingParams(), max_num_tokens=9).info
    plan = StepPlan(0, (request,), (0,), (1,), (1,), (6,), {0: (4,)}, is_decode_only=True)
    logits_of(captured, [plan])
    axes = [[0, 0], [100, 0], [200, 0]]
    assert [[[1, -1], [1, -1], axes, [0.5, 0.5], [0, 1, 1], [0]]] == SEEN


@pytest.mark.usefixtures("passed_events")
def test_ranks_and_padded_steps_of_a_runner_on_a_gpu() -> None:
    """Its kernels under Triton's interpreter; staged as for several ranks."""
    if os.environ.get("TRITON_INTERPRET") != "1":
        pytest.skip("needs Triton's interpreter")
    from pagespec.runner.gpu import runner as gpu_runner
    from tests.runner.gpu.test_runner import Recomputed

    captured = captured_with("graph", (*FIELDS, *NEW))
    sizes = {"max_num_tokens": 24, "max_num_rows": 4, "max_num_blocks": 20}
    runner = gpu_runner.GpuRunner(captured, block_size=8, num_blocks=12, **sizes)
    graphs: Any = Recomputed(runner.run_staged)
    runner._graphs = graphs
    SEEN.clear()
    for plan in PLANS:
        runner.collect(runner.launch(runner.stage(plan), plan))
    mixed, decode = SEEN
    assert mixed[0] == [3, 1, *[-1] * (len(mixed[0]) - 2)]
    assert decode[0] == [3, 1, *[-1] * (len(decode[0]) - 2)]
    assert mixed[1] == [0, 1, 2, -1, 0, *[-1] * (len(mixed[1]) - 5)]
    assert decode[1] == [0, 1, *[-1] * (len(decode[1]) - 2)]
    assert [axis[:2] for axis in decode[2]] == [[2, 3], [102, 103], [202, 203]]
    assert set(mixed[3]) == set(decode[3]) == {0.5}
    assert decode[4] == [0, 1, *[2] * (len(decode[4]) - 2)]
    assert (mixed[5], decode[5]) == ([0], [7])
    assert len(graphs.replayed) == 2


def test_ranks_of_a_runner_on_a_cpu() -> None:
    runner = ModelRunner(captured_with("graph", (*FIELDS, *NEW)), block_size=8, num_blocks=12)
    SEEN.clear()
    for plan in PLANS:
        runner.collect(runner.launch(runner.stage(plan)))
    assert [seen[0] for seen in SEEN] == [[3, 1]] * 2
    assert [seen[5] for seen in SEEN] == [[0], [7]]


def test_layers_that_are_not_traced_read_it_as_well(tmp_path: Path) -> None:
    cache = GraphCache(tmp_path)
    whole = captured_with("graph", (*FIELDS, *NEW), num_layers=8)
    traced, again = (
        captured_with("graph", (*FIELDS, *NEW), num_layers=8, cache=cache) for _ in range(2)
    )
    assert (traced.num_captures, again.num_captures) == (1, 0)
    for captured in (traced, again):
        for one, other in zip(logits_of(captured, PLANS), logits_of(whole, PLANS), strict=True):
            assert torch.equal(one, other)
        assert len(SEEN) == 8 * len(PLANS)


CHANGES: dict[str, tuple[Field, ...]] = {
    "a field more": (*FIELDS, SLOT),
    "another dtype": (*FIELDS, Field("adapter_slot", "row", lambda _: 0, np.int64, is_input=True)),
    "per token": (*FIELDS, Field("adapter_slot", "token", lambda _: 0, is_input=True)),
    "wider": (*FIELDS, Field("adapter_slot", "row", lambda _: 0, is_input=True, width=2)),
}


def test_a_graph_without_the_field_is_not_read_for_one_with_it(tmp_path: Path) -> None:
    cache = GraphCache(tmp_path)

    def num_captures(*fields: Field) -> int:
        loaded = load_model(tiny_model("llama", num_hidden_layers=1))
        specs = probe_model(loaded)
        return capture_model(
            loaded, specs, CaptureOptions(fields=fields), graph_cache=cache
        ).num_captures

    assert num_captures(*FIELDS) == 1
    for name, fields in CHANGES.items():
        assert num_captures(*fields) == 1, name
    assert num_captures(*CHANGES["wider"]) == num_captures(*FIELDS) == 0
    # No graph reads what is not declared as its input.
    assert num_captures(*FIELDS, Field("more", "row", lambda _: 0)) == 0


def test_a_start_record_without_the_field_is_not_restored_with_it(tmp_path: Path) -> None:
    model = tmp_path / "model"
    tiny_model("llama", num_hidden_layers=1).save_pretrained(model)
    graphs = GraphCache(tmp_path / "graphs")

    def record(fields: tuple[Field, ...]) -> StartRecord:
        return StartRecord(
            tmp_path / "starts",
            tmp_path / "graphs",
            find_source(model),
            dtype="auto",
            device=torch.device("cpu"),
            is_compiled=False,
            fields=fields,
        )

    loaded = load_model(model)
    specs = probe_model(loaded)
    described = record(FIELDS).describe(loaded, specs)
    graphs.get(loaded, specs)
    record(FIELDS).write(described, graphs.key)
    assert record(FIELDS).restore() is not None
    for name, fields in CHANGES.items():
        assert record(fields).restore() is None, name


def test_a_pass_reads_an_input_that_the_model_does_not(tmp_path: Path, monkeypatch: Any) -> None:
    """Traced, and with a cached graph, whose sizes no compiler receives."""

    def add_shift(gm: GraphModule, context: PassContext) -> int:
        inputs = [context.step_input(gm.graph, field.name) for field in NEW]
        assert context.step_input(gm.graph, SLOT.name) is inputs[0]
        assert context.step_input(gm.graph, "undeclared") is None
        (normed,) = next(n for n in gm.graph.nodes if n.op == "output").args[0]
        target = torch.ops.pagespec_toy.shift.default
        with gm.graph.inserting_after(normed):
            made = gm.graph.call_function(target, (normed, *inputs))
        made.meta["example_value"] = torch.empty_like(example(normed))  # type: ignore[call-overload]
        normed.replace_all_uses_with(made, delete_user_cb=lambda user: user is not made)
        num_tokens = example(context.step_input(gm.graph, "input_ids")).shape[1]  # type: ignore[attr-defined, arg-type]
        assert example(inputs[2]).shape == (3, num_tokens)  # type: ignore[attr-defined, arg-type]
        return 1

    change_common_passes(monkeypatch, toy=add_shift)
    cache = GraphCache(tmp_path)
    for num_captures in (1, 0):
        loaded = load_model(tiny_model("llama", num_hidden_layers=1))
        captured = capture_model(
            loaded, probe_model(loaded), CaptureOptions(fields=(*FIELDS, *NEW)), graph_cache=cache
        )
        assert captured.num_captures == num_captures
        logits_of(captured, PLANS)
        assert [seen[0] for seen in SEEN] == [[3, 1]] * 2
        assert [seen[5] for seen in SEEN] == [[0], [7]]


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ((Field("x", "row", forms=("decode",), is_input=True),), "x .* form mixed"),
        (
            (
                Field("x", "row", forms=("decode",), is_input=True),
                Field("x", "token", forms=("mixed", "host"), is_input=True),
            ),
            "x .* two",
        ),
        ((Field("block_tables", "row", is_input=True),), "block_tables"),
    ],
)
def test_inputs_that_no_one_graph_can_have_are_refused(
    fields: tuple[Field, ...], reason: str
) -> None:
    with pytest.raises(ValueError, match=reason):
        graph_inputs((*FIELDS, *fields))
