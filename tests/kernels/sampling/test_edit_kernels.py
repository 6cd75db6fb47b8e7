"""The kernels that edit logits, interpreted, against torch and the plain-Python reference."""

from __future__ import annotations

import os
import random

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pagespec import SamplingParams
from pagespec.engine.logit_edits import LogitEdits
from pagespec.engine.plan import StepPlan
from pagespec.engine.request import RequestInfo
from pagespec.runner.cpu.edits import edited_row
from pagespec.runner.edit_batch import EditBatch, EditPacker
from pagespec.structured.matchers import Masks
from tests.support.plain_sampling import edited_logits

pytest.importorskip("triton")
edit_kernels = pytest.importorskip("pagespec.kernels.sampling.edit_kernels")
pytestmark = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") != "1", reason="Triton's kernels are compiled"
)

VOCAB, WIDTH = 71, 24  # no multiple of 32, and less than a block
ENDS = (3, 40)


@st.composite
def edit_params(draw: st.DrawFn) -> tuple[SamplingParams, list[tuple[int, ...]]]:
    """Any combination; and bad words as ids, of a few tokens so that they occur."""
    few = st.integers(0, 5)
    params = SamplingParams(
        temperature=0.0,
        max_tokens=None,
        repetition_penalty=draw(st.sampled_from([1.0, 1.0, 0.5, 1.3, 2.0])),
        presence_penalty=draw(st.sampled_from([0.0, 0.0, -2.0, 0.7])),
        frequency_penalty=draw(st.sampled_from([0.0, 0.0, -0.5, 2.0])),
        logit_bias=draw(st.none() | st.dictionaries(few, st.floats(-100, 100, width=32))),
        allowed_token_ids=draw(
            st.none() | st.lists(st.integers(0, VOCAB - 1), min_size=1).map(lambda ids: [*ids, 9])
        ),
        min_tokens=draw(st.sampled_from([0, 0, 1, 4])),
        stop_token_ids=draw(st.lists(few, max_size=2)),
    )
    words = st.lists(st.lists(few, min_size=1, max_size=4).map(tuple), max_size=4)
    return params, draw(words)


def plan_of(
    rows: list[tuple[SamplingParams, list[tuple[int, ...]], int, int]],
) -> StepPlan:
    """Of rows of (parameters, bad words, tokens of the prompt, tokens in all), each sampled."""
    infos = []
    for i, (params, words, num_prompt, _) in enumerate(rows):
        stops = {*ENDS, *(params.stop_token_ids or ())}
        edits = LogitEdits.of(params, stops, words)
        infos.append(RequestInfo(str(i), num_prompt, params, i, b"", True, edits=edits))
    return StepPlan(
        step=0,
        requests=tuple(infos),
        starts=tuple(known - 1 for *_, known in rows),
        num_tokens=(1,) * len(rows),
        num_samples=(1,) * len(rows),
        token_ids=range(-1, -len(rows) - 1, -1),
    )


def sizes_of(batch: EditBatch) -> object:
    fields = batch.fields
    return edit_kernels.ChunkSizes(
        int(fields[3].max()),
        int((fields[9] - fields[8]).max()),
        int((fields[11] - fields[10]).max()),
        int(np.diff(batch.words).max(initial=0)),
    )


def run_kernels(
    batch: EditBatch, logits: torch.Tensor, history: torch.Tensor, chunk: int
) -> torch.Tensor:
    arrays = (batch.fields, batch.bias, batch.words, batch.word_ids, batch.masks)
    constrained = batch.constrained if len(batch.constrained) else np.zeros((1, 1), np.int32)
    staged = edit_kernels.StagedEdits(*map(torch.from_numpy, (*arrays, constrained)))
    out = torch.full((len(batch), logits.shape[1]), float("nan"))
    counts = torch.full((chunk, logits.shape[1]), -5, dtype=torch.int32)
    for first in range(0, len(batch), chunk):
        rows = out[first : first + chunk]
        edit_kernels.edit_rows(logits, staged, history, counts, rows, first, sizes_of(batch))
    return out


@given(
    asked=st.lists(
        st.tuples(edit_params(), st.integers(1, 12), st.integers(0, 11)), min_size=1, max_size=4
    ),
    seed=st.integers(0, 1000),
    chunk=st.integers(1, 3),
)
def test_kernels_the_reference_and_the_definition_agree(
    asked: list[tuple[tuple[SamplingParams, list[tuple[int, ...]]], int, int]],
    seed: int,
    chunk: int,
) -> None:
    rng = random.Random(seed)
    torch.manual_seed(seed)
    rows = [(params, words, prompt, prompt + more) for (params, words), prompt, more in asked]
    plan = plan_of(rows)
    history_rows = rng.sample(range(len(rows) + 2), len(rows))
    history = torch.randint(0, 6, (len(rows) + 2, WIDTH), dtype=torch.int32)
    logits = torch.randn(len(rows), VOCAB) * 3
    logits[:, 60] = float("-inf")
    packer = EditPacker()
    packer.look(plan)
    batch = packer.pack(plan, VOCAB, history_rows)
    expected = []
    for i, (params, words, num_prompt, num_known) in enumerate(rows):
        known = history[history_rows[i], :num_known].tolist()
        expected.append(
            edited_logits(
                logits[i].double().numpy(),
                known[:num_prompt],
                known[num_prompt:],
                params,
                end_token_ids=ENDS,
                bad_words=words,
            )
        )
    edited = {int(place) for place in batch.fields[0]} if batch is not None else set()
    for i in set(range(len(rows))) - edited:
        assert np.array_equal(expected[i], logits[i].double().numpy()), "it is not edited"
    if batch is None:
        return
    got = run_kernels(batch, logits, history, chunk)
    for j, place in enumerate(batch.fields[0].tolist()):
        known = history[history_rows[place], : rows[place][3]].tolist()
        reference = edited_row(batch, j, logits[place], known)
        np.testing.assert_allclose(reference.double().numpy(), expected[place], 1e-5, 1e-5)
        np.testing.assert_allclose(got[j].double().numpy(), expected[place], 1e-5, 1e-5)


def test_masks_of_the_step_and_allowed_ids_are_both_kept() -> None:
    params = SamplingParams(allowed_token_ids=[1, 31, 32, 70])
    plan = plan_of([(params, [], 1, 2), (SamplingParams(), [], 1, 2)])
    bits = np.full((4, 3), -1, np.int32)
    bits[:, 1] = 0
    packer = EditPacker()
    packer.look(plan)
    batch = packer.pack(plan, VOCAB, [0, 1], Masks(bits, {0: 3, 1: 1}, [0, 1]))
    got = run_kernels(batch, torch.zeros(2, VOCAB), torch.zeros(2, 4, dtype=torch.int32), 2)
    assert got[0].isfinite().nonzero().flatten().tolist() == [1, 31, 70]
    assert got[1].isfinite().nonzero().flatten().tolist() == [*range(32), *range(64, VOCAB)]
    again = packer.pack(plan, VOCAB, [0, 1])
    assert len(again) == 1, "no mask of an earlier step is kept"


def test_batches_alternate() -> None:
    """Constrained rows have a place in every second step, others that edit in each."""
    edited = (SamplingParams(repetition_penalty=1.5, allowed_token_ids=[1, 2, 40]), [], 1, 2)
    both, others = plan_of([edited, (SamplingParams(), [], 1, 2)]), plan_of([edited])
    packer = EditPacker()
    for plan in (both, others) * 3:
        bits = np.full((4, 3), -1, np.int32)
        masks = Masks(bits, {1: 2}, [1]) if plan is both else None
        packer.look(plan)
        batch = packer.pack(plan, VOCAB, [0, 1], masks)
        assert batch is not None
        assert len(batch) == len(plan.requests)
        assert batch.mask_of(0).tolist() == [6, 256, 0]
        assert (bits == -1).all()


def test_a_row_does_not_depend_on_its_place() -> None:
    params = SamplingParams(repetition_penalty=1.3, frequency_penalty=0.4, logit_bias={5: -3.0})
    row = (params, [(1, 2), (4,)], 3, 9)
    torch.manual_seed(0)
    logits = torch.randn(5, VOCAB)
    logits[:] = logits[0]
    history = torch.randint(0, 6, (1, WIDTH), dtype=torch.int32).expand(5, -1).contiguous()
    packer = EditPacker()
    plan = plan_of([row] * 5)
    packer.look(plan)
    batch = packer.pack(plan, VOCAB, range(5))
    for chunk in (1, 2, 5):
        got = run_kernels(batch, logits, history, chunk)
        assert torch.equal(got, got[:1].expand(5, -1)), chunk


def test_histories_are_kept_where_rows_say() -> None:
    history = torch.full((3, 8), -1, dtype=torch.int32)
    rows = torch.tensor([2, 2, -1, 0], dtype=torch.int32)
    positions = torch.tensor([3, 4, 0, 7], dtype=torch.int32)
    edit_kernels.keep_history(torch.tensor([10, 11, 12, 13]), rows, positions, history)
    assert history[2, 3:5].tolist() == [10, 11]
    assert history[0, 7] == 13
    assert (history >= 0).sum() == 3
