"""The kernels that turn staging buffers into graph inputs, under Triton's interpreter."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch

from pagespec.engine.plan import StepPlan
from pagespec.engine.request import Request
from pagespec.engine.sampling_params import SamplingParams
from pagespec.runner.block_tables import BlockTableStore
from pagespec.runner.cpu.pack import CpuStepPacker
from pagespec.runner.gpu import unpack_kernels
from pagespec.runner.gpu.device_buffers import StepBuffers
from pagespec.runner.layout import StepShape
from pagespec.runner.row_params import RowParams

pytest.importorskip("triton")

BLOCK_SIZE, NUM_BLOCKS, WIDTH = 4, 50, 8


def request(name: str, num_tokens: int, seed: int = 0) -> Request:
    ids = list(range(10, 10 + num_tokens))
    return Request(name, ids, SamplingParams(), max_num_tokens=99, seed=seed)


def buffers(
    max_num_tokens: int = 40, max_num_rows: int = 8, max_num_intervals: int = 0
) -> StepBuffers:
    made = StepBuffers(
        max_num_tokens=max_num_tokens,
        max_num_rows=max_num_rows,
        max_num_blocks=WIDTH,
        staging_elements=1000,
        device=torch.device("cpu"),
        max_num_intervals=max_num_intervals,
    )
    for name in ("input_ids", "position_ids", "slot_mapping"):
        made.derived[name].fill_(-77)
    return made


def stage(b: StepBuffers, shape: StepShape, **values: Any) -> None:
    """The values of the packed fields, followed by zeros."""
    packed = b.packed(shape)
    for name, given in values.items():
        array = torch.from_numpy(np.atleast_1d(np.asarray(given)))
        packed[name].zero_()[: len(array)] = array


def store_tables(b: StepBuffers, tables: list[list[int]]) -> None:
    for row, table in enumerate(tables):
        b.table_store[row, : len(table)] = torch.tensor(table, dtype=torch.int32)


def test_updates_land_at_their_places() -> None:
    b = buffers()
    where = random.Random(0).sample(range(b.table_store.numel()), 60)
    staged = torch.tensor(where + list(range(60)), dtype=torch.int32)
    unpack_kernels.update_tables(staged, b.table_store, 60)
    assert b.table_store.view(-1)[where].tolist() == list(range(60))
    assert int((b.table_store != 0).sum()) == 59


def test_mixed_step_equals_the_packer_of_the_cpu() -> None:
    requests = [
        request("a", 9, seed=-5).info,
        request("b", 1, seed=1 << 63).info,
        request("c", 6).info,
    ]
    tables = [[3, 1, 7], [4], [9, 2]]
    ids = [*range(12, 19), 10, 15]
    plan = StepPlan(
        step=0,
        requests=tuple(requests),
        starts=(2, 0, 5),
        num_tokens=(7, 1, 1),
        num_samples=(1, 0, 1),
        token_ids=tuple(ids),
        tables={row: tuple(table) for row, table in enumerate(tables)},
    )
    packer = CpuStepPacker(block_size=BLOCK_SIZE, num_blocks=NUM_BLOCKS, device=torch.device("cpu"))
    expected = packer.pack(plan).inputs

    b = buffers()
    store_tables(b, tables)
    params = RowParams.of([requests[0], requests[2]])
    stage(
        b,
        StepShape.mixed(9, 3),
        token_ids=ids,
        positions=[*range(2, 9), 0, 5],
        token_rows=[*[0] * 7, 1, 2],
        table_rows=[0, 1, 2],
        query_starts=[0, 7, 8, 9],
        context_lens=[9, 1, 6],
        logits_to_keep=[6, 8],  # and of a row that is not sampled
        seeds=params.seeds,
        temperatures=params.temperatures,
        result_row=5,
    )
    made = unpack_kernels.unpack(b, StepShape.mixed(9, 3), BLOCK_SIZE, NUM_BLOCKS * BLOCK_SIZE)
    assert torch.equal(made.input_ids, expected.input_ids)
    assert torch.equal(made.position_ids, expected.position_ids)
    assert torch.equal(made.slot_mapping, expected.slot_mapping)
    assert torch.equal(made.query_starts, expected.query_starts)
    assert torch.equal(made.context_lens, expected.context_lens)
    assert torch.equal(made.logits_to_keep[:2], expected.logits_to_keep)
    for row, table in enumerate(tables):
        num_used = -(-int(made.context_lens[row]) // BLOCK_SIZE)
        assert made.block_tables[made.table_rows[row], :num_used].tolist() == table[:num_used]
    assert b.sample_positions[:2].tolist() == [9, 6]
    assert b.seeds[:2].tolist() == [-5, 0]
    assert b.temperatures[:2].tolist() == [1.0, 1.0]
    assert b.result_row.item() == 5


def test_decode_step_with_a_fed_token_a_new_block_and_padding() -> None:
    b = buffers()
    b.table_store[3, :2] = torch.tensor([11, 12], dtype=torch.int32)
    b.table_store[5, :3] = torch.tensor([21, 22, -9], dtype=torch.int32)
    b.sampled[1] = 1234
    bucket = 4
    params = RowParams.of([request("a", 1, seed=-2).info, request("b", 1, seed=3).info])
    stage(
        b,
        StepShape.decode(bucket),
        token_ids=[77, -2],  # known; the second token the last step sampled
        positions=[6, 8],
        table_rows=[3, 5],
        new_blocks=[-1, 23, -1, -1],
        seeds=params.seeds,
        temperatures=[0.5, 0.0],
        num_padding_rows=2,
        result_row=7,
    )
    null_slot = NUM_BLOCKS * BLOCK_SIZE
    shape = StepShape.decode(bucket)
    made = unpack_kernels.unpack(b, shape, BLOCK_SIZE, null_slot)
    assert made.input_ids[0, :2].tolist() == [77, 1234]
    assert made.position_ids[0, :2].tolist() == [6, 8]
    assert made.slot_mapping.tolist() == [12 * 4 + 2, 23 * 4, null_slot, null_slot]
    assert made.query_starts.tolist() == [0, 1, 2, 2, 2]
    assert made.context_lens.tolist() == [7, 9, 0, 0]
    assert made.table_rows.tolist() == [3, 5, 0, 0]
    assert b.table_store[3, :2].tolist() == [11, 12]
    assert b.table_store[5, :3].tolist() == [21, 22, 23]
    assert b.seeds[:2].tolist() == [-2, 3]
    assert b.temperatures[:2].tolist() == [0.5, 0.0]
    assert b.sample_positions[:2].tolist() == [7, 9]
    assert b.result_row.item() == 7


def test_state_tables_are_read_in_the_store() -> None:
    """A step copies none of them: kernels read them by the rows of the store."""
    b = buffers(max_num_tokens=80, max_num_intervals=20)
    assert b.state_store is not None
    b.state_store.copy_(torch.arange(b.state_store.numel()).view_as(b.state_store))
    for shape in (StepShape.decode(4), StepShape.mixed(70, 4)):
        stage(b, shape, positions=[0, 7, 8], table_rows=[3, 5, 1, 0])
        step = unpack_kernels.unpack(b, shape, BLOCK_SIZE, 0)
        assert step.state_tables is not None
        tables = step.state_tables[step.table_rows.long()]
        assert tables.tolist() == [[*range(20 * row, 20 * row + 20)] for row in (3, 5, 1, 0)]
        assert step.state_tables.data_ptr() == b.state_store.data_ptr()


def decode_plan(requests: list[Request], **told: Any) -> StepPlan:
    num_rows = len(requests)
    return StepPlan(
        step=0,
        requests=tuple(r.info for r in requests),
        starts=tuple(len(r.token_ids) for r in requests),
        num_tokens=(1,) * num_rows,
        num_samples=(1,) * num_rows,
        token_ids=range(-1, -num_rows - 1, -1),
        is_decode_only=True,
        **told,
    )


def test_the_table_store_sends_what_the_plan_says() -> None:
    a, b = request("a", 8), request("b", 4)
    store = BlockTableStore(3, WIDTH)
    plan = decode_plan([a, b], tables={0: (1, 2), 1: (5,)})
    store.place(plan)
    first, second = (row * WIDTH for row in store.rows)
    assert store.pending_writes(plan) == ([first, first + 1, second], [1, 2, 5])

    new_blocks = np.full(2, -1, np.int32)
    plan = decode_plan([a, b], new_blocks={1: (6,)})
    store.place(plan)
    assert store.pending_writes(plan, new_blocks) == ([], [])
    assert new_blocks.tolist() == [-1, 6]

    plan = decode_plan([a, b], new_blocks={0: (3, 4), 1: (7,)})
    store.place(plan)
    assert store.pending_writes(plan) == ([first + 2, first + 3, second + 2], [3, 4, 7])

    # Gone and back in one plan, with fewer blocks: sent whole.
    plan = decode_plan([a, b], released=("b",), tables={1: (8, 9)})
    store.place(plan)
    begin = store.rows[1] * WIDTH
    assert store.pending_writes(plan) == ([begin, begin + 1], [8, 9])


def test_the_table_store_sends_state_tables_behind_all_block_tables() -> None:
    a, b = request("a", 8), request("b", 4)
    store = BlockTableStore(3, WIDTH, 5, null_state_slot=44)
    plan = decode_plan([a, b], tables={0: (1,), 1: (5,)}, state_tables={0: (-1, 7), 1: (3,)})
    store.place(plan)
    blocks = [row * WIDTH for row in store.rows]
    states = [3 * WIDTH + row * 5 for row in store.rows]
    assert store.pending_writes(plan) == (
        [*blocks, states[0], states[0] + 1, states[1]],
        [1, 5, 44, 7, 3],
    )
    plan = decode_plan([a, b], new_state_slots={1: (9, 2)})
    store.place(plan)
    assert store.pending_writes(plan) == ([states[1] + 1, states[1] + 2], [9, 2])
    plan = decode_plan([a, b], released=("a",), tables={0: (8,)}, state_tables={0: (6,)})
    store.place(plan)
    (block, state), ids = store.pending_writes(plan)
    assert ids == [8, 6]
    assert (block, state) == (store.rows[0] * WIDTH, 3 * WIDTH + store.rows[0] * 5)


def test_rows_of_requests_that_are_gone_are_free_again() -> None:
    store = BlockTableStore(2, WIDTH)
    gone: tuple[str, ...] = ()
    for step in range(6):
        pair = [request(f"{step}.{i}", 4) for i in range(2)]
        store.place(decode_plan(pair, released=gone, tables={0: (step,), 1: (step,)}))
        assert sorted(store.rows) == [0, 1]
        gone = tuple(r.request_id for r in pair)
    with pytest.raises(RuntimeError, match="which has no table"):
        store.place(decode_plan(pair, released=("0.0",)))
