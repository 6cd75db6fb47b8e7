"""Fields of a step: packed, sent, and unpacked by kernels under Triton's interpreter."""

from __future__ import annotations

import os
import weakref
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pagespec.compile.step_fields import FIELDS, GPU, LAST, Field, step_fields
from pagespec.compile.step_inputs import BoundGraph, StepInputs
from pagespec.engine.plan import StepPlan
from pagespec.engine.request import Request
from pagespec.engine.sampling_params import SamplingParams
from pagespec.runner.cpu.pack import CpuStepPacker, PackedStep
from pagespec.runner.layout import LAYOUT, Layout, PlanArrays, StepShape, layout_of
from tests.support.packers import PassedEvent

pytest.importorskip("triton")

from pagespec.runner.gpu.device_buffers import StepBuffers
from pagespec.runner.gpu.pack import GpuStepPacker, StagedStep, send
from pagespec.runner.gpu.unpack_kernels import unpack
from pagespec.runner.pinned import PinnedRing

BLOCK_SIZE, NUM_BLOCKS, WIDTH, MAX_ROWS, MAX_TOKENS = 4, 90, 12, 6, 40
NULL_SLOT = NUM_BLOCKS * BLOCK_SIZE
DEVICE = "cpu" if os.environ.get("TRITON_INTERPRET") == "1" else "cuda"
pytestmark = pytest.mark.skipif(
    DEVICE == "cuda" and not torch.cuda.is_available(), reason="neither interpreter nor GPU"
)


class Staging:
    """Sends and unpacks plans as the GPU runner does."""

    def __init__(self, layout: Layout = LAYOUT) -> None:
        num_staged = StepBuffers.elements_to_stage(MAX_TOKENS, MAX_ROWS, layout) + 200
        self.buffers = StepBuffers(
            max_num_tokens=MAX_TOKENS,
            max_num_rows=MAX_ROWS,
            max_num_blocks=WIDTH,
            staging_elements=num_staged,
            device=torch.device(DEVICE),
            layout=layout,
        )
        self.packer = GpuStepPacker(MAX_ROWS, WIDTH, layout=layout)
        self._ring = PinnedRing(2, num_staged, torch.int32)
        if DEVICE == "cpu":
            ring: Any = self._ring
            ring._events = [PassedEvent() for _ in ring._events]

    def inputs(self, plan: StepPlan, shape: StepShape | None, result_row: int = 0) -> StepInputs:
        index, _, array = self._ring.take()
        array.fill(-7)  # of an older step
        staged, array = self.packer.pack(plan, shape, result_row, array)
        staged = StagedStep.from_array(staged.to_array())
        send(self.buffers, staged, self._ring, index, array)
        return unpack(self.buffers, staged.shape, BLOCK_SIZE, NULL_SLOT)


@dataclass
class Row:
    """A request with the values that the test expects."""

    info: Any
    start: int
    table: list[int]


def shapes_of(plan: StepPlan, num_more: int) -> list[StepShape | None]:
    num_rows, num_tokens = len(plan), plan.total_num_tokens
    rows = min(max(2, num_rows + num_more), MAX_ROWS)
    shapes: list[StepShape | None] = [None]
    shapes.append(StepShape.mixed(min(max(2, num_tokens + num_more), MAX_TOKENS), rows))
    if plan.is_decode_only:
        shapes.append(StepShape.decode(rows))
    return shapes


@st.composite
def steps(draw: st.DrawFn) -> list[tuple[list[int], list[int], int, int]]:
    """For each step: the rows, their numbers of tokens, the padding, and the shape."""
    found = []
    for _ in range(draw(st.integers(1, 4))):
        rows = draw(
            st.lists(st.integers(0, MAX_ROWS - 1), min_size=1, max_size=MAX_ROWS, unique=True)
        )
        is_decode = draw(st.booleans())
        lengths = [1 if is_decode else draw(st.integers(1, 6)) for _ in rows]
        found.append((rows, lengths, draw(st.integers(0, 3)), draw(st.integers(0, 2))))
    return found


@given(steps(), st.randoms(use_true_random=False))
@settings(max_examples=60, deadline=None)
def test_inputs_are_what_the_plan_says(drawn: Any, rng: Any) -> None:
    """The reference computes each input from the plans alone, token by token, in plain Python."""
    staging = Staging()
    seeds = [rng.choice([0, -1, 1 << 31, -(1 << 63), (1 << 64) - 1, 77]) for _ in range(MAX_ROWS)]
    rows = [
        Row(
            Request(
                f"r{i}",
                [1, 2, 3],
                SamplingParams(temperature=rng.choice([0.0, 0.5, 1.3])),
                max_num_tokens=48,
                seed=seeds[i],
            ).info,
            0,
            [],
        )
        for i in range(MAX_ROWS)
    ]
    blocks = iter(rng.sample(range(NUM_BLOCKS), MAX_ROWS * WIDTH))
    sampled: list[int] = []
    for number, (chosen, lengths, num_more, kind) in enumerate(drawn):
        part = [rows[i] for i in chosen]
        tables, new_blocks = {}, {}
        for at, (row, length) in enumerate(zip(part, lengths, strict=True)):
            was_admitted = bool(row.table)
            missing = -(-(row.start + length) // BLOCK_SIZE) - len(row.table)
            new = tuple(next(blocks) for _ in range(missing))
            row.table += new
            if not was_admitted:
                tables[at] = new
            elif new:
                new_blocks[at] = new
        is_decode = all(length == 1 for length in lengths)
        num_samples = tuple(1 if is_decode else rng.randrange(2) for _ in part)
        known = [-(j + 1) for j in range(len(sampled))]
        ids = tuple(rng.choice([*known, 5, 1 << 20]) for _ in range(sum(lengths)))
        plan = StepPlan(
            step=number,
            requests=tuple(row.info for row in part),
            starts=tuple(row.start for row in part),
            num_tokens=tuple(lengths),
            num_samples=num_samples,
            token_ids=ids,
            tables=tables,
            new_blocks=new_blocks,
            is_decode_only=is_decode,
        )
        shapes = shapes_of(plan, num_more)
        shape = shapes[kind % len(shapes)]
        made = staging.inputs(plan, shape, number)

        positions, slots, kept, starts = [], [], [], [0]
        for row, length, samples in zip(part, lengths, num_samples, strict=True):
            for position in range(row.start, row.start + length):
                positions.append(position)
                block = row.table[position // BLOCK_SIZE]
                slots.append(block * BLOCK_SIZE + position % BLOCK_SIZE)
            kept += [len(positions) - 1] * samples
            starts.append(len(positions))
        num_tokens, num_rows = len(ids), len(part)
        assert made.input_ids[0, :num_tokens].tolist() == [
            token if token >= 0 else sampled[-1 - token] for token in ids
        ]
        assert made.position_ids[0].tolist()[:num_tokens] == positions
        padding = made.slot_mapping.shape[0] - num_tokens
        assert made.slot_mapping.tolist() == slots + [NULL_SLOT] * padding
        num_padded = made.context_lens.shape[0] - num_rows
        assert made.query_starts.tolist() == starts + [num_tokens] * num_padded
        ends = [row.start + length for row, length in zip(part, lengths, strict=True)]
        assert made.context_lens.tolist() == ends + [0] * num_padded
        assert made.logits_to_keep[: len(kept)].tolist() == kept
        assert all(0 <= token < made.input_ids.shape[1] for token in made.logits_to_keep.tolist())
        for at, row in enumerate(part):
            num_used = -(-ends[at] // BLOCK_SIZE)
            table = made.block_tables[made.table_rows[at]]
            assert table[:num_used].tolist() == row.table[:num_used]
        b, owners = staging.buffers, [r for r, n in zip(part, num_samples, strict=True) if n]
        sent = [int(np.uint64(r.info.seed & (1 << 64) - 1).astype(np.int64)) for r in owners]
        assert b.seeds[: len(kept)].tolist() == sent
        temperatures = [r.info.sampling_params.temperature for r in owners]
        assert b.temperatures[: len(kept)].tolist() == [float(np.float32(t)) for t in temperatures]
        assert b.sample_positions[: len(kept)].tolist() == [positions[k] + 1 for k in kept]
        assert b.result_row.item() == number

        for row, end in zip(part, ends, strict=True):
            row.start = end
        sampled = [rng.randrange(1000) for _ in kept]
        b.sampled[: len(sampled)] = torch.tensor(sampled, dtype=torch.int64)


@pytest.mark.gpu
def test_inputs_are_what_the_plan_says_on_a_gpu() -> None:
    assert DEVICE == "cuda", "the kernels are interpreted"
    test_inputs_are_what_the_plan_says()


# A field more --------------------------------------------------------------------------------

SLOTS = {"a": 3, "b": 1}
TOY_FIELDS = (
    Field(
        "adapter_slot",
        "row",
        lambda step: [SLOTS[r.request_id] for r in step.plan.requests],
        padding=-1,
        is_input=True,
    ),
    Field(
        "grid_positions",
        "token",
        lambda step: [[p + 100 * axis for p in range(step.counts["token"])] for axis in range(3)],
        dtype=np.int64,
        padding=-5,
        is_input=True,
        width=3,
    ),
    Field("scale", "sample", lambda step: 0.25, dtype=np.float32, padding=LAST, is_input=True),
    Field("epoch", "step", lambda step: step.plan.step, is_input=True),
)


def two_rows(*, is_decode: bool) -> StepPlan:
    infos = tuple(Request(n, [1, 2], SamplingParams(), max_num_tokens=9).info for n in "ab")
    return StepPlan(
        step=7,
        requests=infos,
        starts=(1, 0),
        num_tokens=(1, 1 if is_decode else 2),
        num_samples=(1, 1),
        token_ids=(4, 5) if is_decode else (4, 5, 6),
        tables={0: (8,), 1: (9,)},
        is_decode_only=is_decode,
    )


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [StepShape.mixed(6, 4), StepShape.decode(4)], ids=str)
def test_a_captured_graph_reads_a_new_input_of_every_step(shape: StepShape) -> None:
    """The views that a graph was captured with have each step's values."""
    staging = Staging(Layout((*TOY_FIELDS, *FIELDS)))
    plan = two_rows(is_decode=shape.is_decode)
    staging.inputs(plan, shape)
    graph, b = torch.cuda.CUDAGraph(), staging.buffers
    with torch.cuda.graph(graph):
        inputs = unpack(b, shape, BLOCK_SIZE, NULL_SLOT)
        seen = inputs.more["adapter_slot"] * 10
    for number in (1, 2):
        expected = b.packed(shape)["adapter_slot"].fill_(number)
        b.derived["input_ids"].zero_()
        graph.replay()
        assert seen.tolist() == [10 * number] * len(expected)
        assert inputs.input_ids[0, : plan.total_num_tokens].tolist() == list(plan.token_ids)


@pytest.mark.parametrize("place", [0, 5, len(FIELDS)], ids=["first", "between", "last"])
@pytest.mark.parametrize("shape", [None, StepShape.mixed(6, 4), StepShape.decode(4)], ids=str)
def test_one_line_more_is_one_input_more_on_a_gpu(place: int, shape: StepShape | None) -> None:
    plan = two_rows(is_decode=shape is not None and shape.is_decode)
    layout = Layout((*FIELDS[:place], *TOY_FIELDS, *FIELDS[place:]))
    made, plain = Staging(layout).inputs(plan, shape), Staging().inputs(plan, shape)
    num_padded = len(made.context_lens) - 2
    assert made.more["adapter_slot"].tolist() == [3, 1] + [-1] * num_padded
    num_tokens = plan.total_num_tokens
    padding = [-5] * (made.input_ids.shape[1] - num_tokens)
    axes = [[*range(first, first + num_tokens), *padding] for first in (0, 100, 200)]
    assert made.more["grid_positions"].tolist() == axes
    assert made.more["scale"].tolist() == [0.25] * len(made.logits_to_keep)
    assert made.more["epoch"].tolist() == [7]
    assert made.more["grid_positions"].dtype == torch.int64
    for name in ("input_ids", "position_ids", "slot_mapping", "query_starts", "context_lens"):
        assert torch.equal(made.tensor(name), plain.tensor(name)), name


def test_one_line_more_is_one_input_more_on_a_cpu_and_its_other_ranks() -> None:
    layout = Layout((*TOY_FIELDS, *FIELDS))
    packer = CpuStepPacker(
        block_size=BLOCK_SIZE, num_blocks=NUM_BLOCKS, device=torch.device("cpu"), layout=layout
    )
    packed = packer.pack(two_rows(is_decode=False))
    received = PackedStep.from_arrays(packed.to_arrays(), layout)
    for inputs in (packed.inputs, received.inputs):
        assert inputs.more["adapter_slot"].tolist() == [3, 1]
        assert inputs.more["grid_positions"].tolist() == [
            [0, 1, 2],
            [100, 101, 102],
            [200, 201, 202],
        ]
        assert inputs.more["scale"].tolist() == [0.25, 0.25]
        assert inputs.more["epoch"].tolist() == [7]
        assert inputs.input_ids.tolist() == [[4, 5, 6]]
    assert received.num_sampled == 2


def test_a_graph_reads_such_an_input_by_its_name() -> None:
    inputs = Staging(Layout((*FIELDS, *TOY_FIELDS))).inputs(two_rows(is_decode=False), None)
    graph = BoundGraph(
        lambda slot, num_rows: (slot.unsqueeze(0) * num_rows,),
        [("input", "adapter_slot"), ("size", "adapter_slot", 0)],
        (),
    )
    assert graph(inputs).logits.tolist() == [6, 2]


def test_views_of_few_shapes_are_kept_and_read_the_same_memory() -> None:
    staging = Staging()
    b, plan = staging.buffers, two_rows(is_decode=False)
    shapes = [StepShape.mixed(t, r) for t in range(6, MAX_TOKENS) for r in range(2, MAX_ROWS)]
    kept = weakref.ref(b.inputs(shapes[0]).context_lens)
    places = b.inputs(shapes[0]).context_lens.data_ptr()
    assert kept() is b.inputs(shapes[0]).context_lens
    for shape in shapes[1:]:
        b.inputs(shape)
    assert len(shapes) > 128
    assert kept() is None
    assert b.inputs(shapes[0]).context_lens.data_ptr() == places
    assert staging.inputs(plan, shapes[0]).context_lens.tolist() == [2, 2]


def test_a_derived_input_may_have_a_width() -> None:
    field = Field("grid", "token", dtype=np.int64, is_input=True, width=3)
    layout = Layout((*FIELDS, field))
    largest, sizes = StepShape.mixed(9, 4), StepShape.mixed(5, 2)
    derived = layout.allocate(largest, torch.device("cpu"))
    words = torch.zeros(layout.num_words(sizes), dtype=torch.int32)
    made = layout.inputs(layout.views(words, sizes), derived, sizes)["grid"]
    assert made.shape == (3, 5)
    made.fill_(2)
    assert derived["grid"].sum() == 2 * 15


def test_fields_do_not_overlap_and_are_aligned() -> None:
    """Fills each field in turn, and reads all fields again."""
    layout = Layout((*TOY_FIELDS, *FIELDS))
    for form in GPU:
        for sizes in (
            StepShape(2, 2, 2, form),
            StepShape(7, 3, 3, form),
            StepShape(64, 64, 64, form),
        ):
            words = torch.zeros(layout.num_words(sizes), dtype=torch.int32)
            for number, view in enumerate(layout.views(words, sizes).values(), 1):
                assert not view.any()
                assert view.storage_offset() * view.element_size() % 16 == 0
                view.fill_(number)
            for number, view in enumerate(layout.views(words, sizes).values(), 1):
                assert (view == number).all()


def test_two_fields_of_one_name_are_refused() -> None:
    double = Field("positions", "row", lambda step: 0, forms=("decode",))
    with pytest.raises(ValueError, match="one name in form decode"):
        Layout((*FIELDS, double))


def test_a_source_of_a_wrong_length_is_refused() -> None:
    wrong = Field("wrong", "row", lambda step: [1, 2, 3])
    layout = Layout((wrong,))
    for sizes in (StepShape.mixed(3, 2), StepShape.mixed(8, 6)):
        with pytest.raises(ValueError, match="broadcast"):
            layout.pack(PlanArrays(two_rows(is_decode=False)), sizes, np.zeros(99, np.int32))


# More samples than rows ----------------------------------------------------------------------


def three_samples(*, num_rows: int = 2) -> StepPlan:
    """Each row has a known token and two draft tokens, and samples after each of them."""
    infos = tuple(
        Request(f"d{i}", [1, 2], SamplingParams(), max_num_tokens=9).info for i in range(num_rows)
    )
    return StepPlan(
        step=7,
        requests=infos,
        starts=(1,) * num_rows,
        num_tokens=(3,) * num_rows,
        num_samples=(3,) * num_rows,
        token_ids=(4, 5, 6) * num_rows,
        tables={row: (8 + row,) for row in range(num_rows)},
    )


@pytest.mark.parametrize("shape", [StepShape.mixed(6, 2), StepShape.mixed(9, 4)], ids=str)
def test_more_samples_than_a_step_has_room_for_are_refused_by_name(shape: StepShape) -> None:
    packer, array = GpuStepPacker(MAX_ROWS, WIDTH), np.zeros(300, np.int32)
    with pytest.raises(ValueError, match=r"6 samples.* (2|4)$"):
        packer.pack(three_samples(), shape, 0, array)
    # The same words of what else may not fit.
    packer.reset()
    with pytest.raises(ValueError, match=r"3 rows.* 2$"):
        packer.pack(three_samples(num_rows=3), StepShape.mixed(9, 2), 0, array)
    packer.reset()
    with pytest.raises(ValueError, match=r"9 tokens.* 8$"):
        packer.pack(three_samples(num_rows=3), StepShape.mixed(8, 3), 0, array)


def test_recurrent_layers_receive_the_number_of_draft_tokens_of_each_row() -> None:
    layout = layout_of(step_fields(has_drafts=True, is_recurrent=True))
    sizes = {"block_size": BLOCK_SIZE, "num_blocks": NUM_BLOCKS, "device": torch.device("cpu")}
    for plan, expected in ((three_samples(), [2, 2]), (two_rows(is_decode=False), [0, 0])):
        packed = CpuStepPacker(layout=layout, **sizes).pack(plan)
        assert packed.inputs.more["num_drafts"].tolist() == expected
    mixed = Staging(layout).inputs(two_rows(is_decode=False), StepShape.mixed(6, 4))
    assert mixed.more["num_drafts"].tolist() == [0] * 4
    # No entries: the kernels without draft tokens are launched.
    decode = Staging(layout).inputs(two_rows(is_decode=True), StepShape.decode(4))
    assert decode.more["num_drafts"].tolist() == []
    for has_drafts, is_recurrent in ((True, False), (False, True)):
        assert step_fields(has_drafts=has_drafts, is_recurrent=is_recurrent) is FIELDS
