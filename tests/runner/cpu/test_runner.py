"""The CPU runner: failures, sampling, packing, and rejected settings."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from pagespec.compile.captured_model import CapturedModel, CaptureOptions, capture_model
from pagespec.compile.load.load import load_model
from pagespec.compile.probe.probe import probe_model
from pagespec.engine.plan import StepPlan
from pagespec.errors import InvalidInputError, UnsupportedModelError
from pagespec.runner.cpu.pack import CpuStepPacker
from pagespec.runner.cpu.runner import ModelRunner
from tests.support.captures import graph_cache
from tests.support.driving import drive, make_requests
from tests.support.models import tiny_model


@pytest.fixture(scope="module")
def captured() -> CapturedModel:
    loaded = load_model(tiny_model("llama"))
    return capture_model(loaded, probe_model(loaded), graph_cache=graph_cache())


def run(runner: ModelRunner, chunk: int, seed: int = 0, **params: float) -> list[list[int]]:
    requests = make_requests([[9, 8, 7, 6, 5], [100, 200, 300], [4] * 20], 12, **params)
    drive(runner, requests, block_size=4, num_blocks=60, chunk=chunk, seed=seed)
    return [request.output_token_ids for request in requests]


def test_a_failing_step_leaves_the_runner_usable(captured: CapturedModel) -> None:
    runner = ModelRunner(captured, block_size=4, num_blocks=60)
    expected = run(runner, chunk=5)
    fails = True

    def on_logits(plan: StepPlan, logits: torch.Tensor) -> None:
        if fails:
            raise ValueError("from the user's hook")

    runner = ModelRunner(captured, block_size=4, num_blocks=60, on_logits=on_logits)
    with pytest.raises(ValueError, match="hook"):
        run(runner, chunk=5)
    request = make_requests([[1, 2, 3, 4, 5]], 4)[0]
    plan = StepPlan(0, (request.info,), (0,), (5,), (True,), (1, 2, 3, 4, 5), {0: (7,)})
    with pytest.raises(ValueError, match="1 blocks for 5 tokens"):
        runner.dispatch(plan)
    fails = False
    assert run(runner, chunk=5) == expected


def test_random_sampling_does_not_depend_on_the_schedule(captured: CapturedModel) -> None:
    runner = ModelRunner(captured, block_size=4, num_blocks=60)
    outputs = [
        run(runner, chunk, seed, temperature=1.0, top_k=50) for chunk, seed in ((3, 0), (9, 1))
    ]
    assert outputs[0] == outputs[1]
    assert outputs[0] != run(runner, 3)


def test_one_graph_serves_all_sizes(captured: CapturedModel) -> None:
    for block_size, num_blocks in ((1, 80), (8, 20)):
        runner = ModelRunner(captured, block_size=block_size, num_blocks=num_blocks)
        for num_rows in (1, 2, 5):
            requests = make_requests([[3, 1, 4, 1, 5]] * num_rows, 3)
            drive(runner, requests, block_size=block_size, num_blocks=num_blocks, chunk=4)
            assert len({tuple(r.token_ids) for r in requests}) == 1


def test_a_step_without_samples_returns_none(captured: CapturedModel) -> None:
    runner = ModelRunner(captured, block_size=4, num_blocks=4)
    request = make_requests([[1, 2, 3]], 4)[0]
    for start, n in ((0, 1), (1, 2)):
        tables = {0: (2,)} if start == 0 else {}
        plan = StepPlan(0, (request.info,), (start,), (n,), (False,), (1,) * n, tables)
        assert list(runner.collect(runner.dispatch(plan)).token_ids) == []


def test_packing() -> None:
    packer = CpuStepPacker(block_size=4, num_blocks=10, device=torch.device("cpu"))
    a, b = make_requests([[11, 12, 13, 14, 15, 16], [21, 22]], 4)
    ids, tables = (12, 13, 14, 15, 22), {0: (7, 3), 1: (5,)}
    packed = packer.pack(StepPlan(0, (a.info, b.info), (1, 1), (4, 1), (False, True), ids, tables))
    inputs = packed.inputs
    assert inputs.input_ids.tolist() == [[12, 13, 14, 15, 22]]
    assert inputs.position_ids.tolist() == [[1, 2, 3, 4, 1]]
    assert inputs.slot_mapping.tolist() == [29, 30, 31, 12, 21]
    assert inputs.query_starts.tolist() == [0, 4, 5]
    assert inputs.context_lens.tolist() == [5, 2]
    assert inputs.block_tables.tolist() == [[7, 3], [5, 10]]
    assert inputs.logits_to_keep.tolist() == [4, 4]
    assert packed.num_sampled == 1
    # One token alone is padded into the null block.
    inputs = packer.pack(StepPlan(1, (b.info,), (1,), (1,), (True,), (22,))).inputs
    assert inputs.slot_mapping.tolist() == [21, 40]
    assert inputs.query_starts.tolist() == [0, 1, 1]
    assert inputs.context_lens.tolist() == [2, 0]


def test_packing_of_draft_tokens() -> None:
    """A row is sampled from its last own position and from each draft token's; each sample has the
    request's parameters and its own position."""
    packer = CpuStepPacker(block_size=4, num_blocks=10, device=torch.device("cpu"))
    a, b = make_requests([[11, 12], [21, 22, 23]], 9, temperature=0.8)
    ids = (12, 13, 14, 21, 22, 23)
    plan = StepPlan(0, (a.info, b.info), (1, 0), (3, 3), (3, 1), ids, {0: (7,), 1: (5,)})
    packed = packer.pack(plan)
    assert packed.num_sampled == 4
    assert packed.inputs.input_ids.tolist() == [list(ids)]
    assert packed.inputs.logits_to_keep.tolist() == [0, 1, 2, 5]
    assert packed.sampling is not None
    assert packed.sampling.positions.tolist() == [2, 3, 4, 3]
    assert packed.sampling.seeds.tolist() == [a.seed] * 3 + [b.seed]


def test_copies_are_done_before_the_step_also_by_other_ranks(captured: CapturedModel) -> None:
    (request,) = make_requests([[1, 2, 3, 4, 5]], 4, temperature=1.0)
    for is_staged in (False, True):
        runner = ModelRunner(captured, block_size=4, num_blocks=9)
        for caches in runner.kv_caches:
            for cache in caches:
                cache.copy_(torch.randn_like(cache))
        old = [tuple(cache.clone() for cache in caches) for caches in runner.kv_caches]
        copies = ((2, 3), (2, 4), (0, 5))
        plan = StepPlan(0, (request.info,), (4,), (1,), (True,), (5,), {0: (1, 3)}, copies=copies)
        handle = runner.launch(runner.stage(plan)) if is_staged else runner.dispatch(plan)
        assert len(runner.collect(handle).token_ids) == 1
        for caches, before in zip(runner.kv_caches, old, strict=True):
            for cache, was in zip(caches, before, strict=True):
                was[[3, 4, 5]] = was[[2, 2, 0]]
                assert torch.equal(cache[:3], was[:3])
                assert torch.equal(cache[4:9], was[4:9])
                assert torch.equal(cache[3, 1:], was[3, 1:]), "its first slot is the row's"


def test_block_tables_are_what_the_plans_say() -> None:
    packer = CpuStepPacker(block_size=1, num_blocks=99, device=torch.device("cpu"))
    (request,) = make_requests([[1, 2, 3, 4]], 60)

    def table(**told: Any) -> list[int]:
        plan = StepPlan(0, (request.info,), (0,), (1,), (True,), (1,), **told)
        return packer.pack(plan).inputs.block_tables[0].tolist()

    assert table(tables={0: (5, 6)}) == [5, 6]
    assert table() == [5, 6]
    assert table(new_blocks={0: (7,)}) == [5, 6, 7]
    assert table(released=("r0",), tables={0: (8, 9)}) == [8, 9]
    assert table(new_blocks={0: tuple(range(20, 60))}) == [8, 9, *range(20, 60)]
    with pytest.raises(KeyError):  # its block table was never sent
        table(released=("r0",))


def test_state_tables_are_what_the_plans_say() -> None:
    packer = CpuStepPacker(
        block_size=1,
        num_blocks=99,
        device=torch.device("cpu"),
        num_state_slots=20,
        state_interval=4,
    )
    (request,) = make_requests([[1, 2, 3, 4]], 60)

    def table(start: int = 0, **told: Any) -> list[int]:
        plan = StepPlan(0, (request.info,), (start,), (1,), (True,), (1,), **told)
        states = packer.pack(plan).inputs.state_tables
        assert states is not None
        assert states[1].tolist() == [20] * states.shape[1], "of no row"
        return states[0].tolist()

    blocks = {0: tuple(range(30))}
    # -1 is the null slot, and so are entries beyond the end of a table.
    assert table(tables=blocks, state_tables={0: (-1, 3, 7)}) == [20, 3, 7]
    assert table(start=12, new_state_slots={0: (7,)}) == [20, 3, 7, 7]
    with pytest.raises(ValueError, match="4 state slots for 17 tokens"):
        table(start=16)
    assert table(released=("r0",), tables=blocks, state_tables={0: (5,)}) == [5, 20]


def test_refusals(captured: CapturedModel) -> None:
    with pytest.raises(InvalidInputError, match="block_size"):
        ModelRunner(captured, block_size=0, num_blocks=4)
    with pytest.raises(InvalidInputError, match="compile"):
        capture_model(captured.loaded, captured.specs, CaptureOptions(compile="magic"))


def test_a_graph_break_is_refused() -> None:
    model = tiny_model("llama")
    loaded = load_model(model)
    specs = probe_model(loaded)
    mlp = model.model.layers[0].mlp  # type: ignore[union-attr]
    inner = mlp.forward

    def forward(x: torch.Tensor) -> torch.Tensor:
        return inner(x) if float(x.sum()) > 0 else inner(x) + 0

    mlp.forward = forward
    with pytest.raises(UnsupportedModelError, match="not one graph"):
        capture_model(loaded, specs)
