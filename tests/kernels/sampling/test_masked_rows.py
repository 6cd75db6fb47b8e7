"""Rows sampled directly from masked logits, interpreted, against copies with edited logits."""

from __future__ import annotations

import os
import random
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import Tensor

from pagespec import SamplingParams, StructuredOutputs
from pagespec.engine.logit_edits import LogitEdits
from pagespec.engine.plan import StepPlan
from pagespec.engine.request import RequestInfo
from pagespec.kernels.sampling.sampler import SamplingInputs, sample
from pagespec.runner.gpu.device_buffers import StepBuffers
from pagespec.structured.matchers import Masks
from tests.kernels.sampling.test_gumbel import expected as cpu_tokens

pytest.importorskip("triton")
gumbel = pytest.importorskip("pagespec.kernels.sampling.gumbel")
gpu_edits = pytest.importorskip("pagespec.runner.gpu.edits")
pytestmark = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") != "1", reason="Triton's kernels are compiled"
)

KINDS = [
    {"temperature": 0.0},
    {},
    {"temperature": 0.3},
    {"top_k": 7},
    {"top_p": 0.8, "temperature": 1.4},
    {"min_p": 0.1},
    {"top_k": 40, "top_p": 0.9, "min_p": 0.01},
    {"temperature": 0.0, "top_k": 3},
]
NUM_MASKS = 40


def plan_of(params: list[SamplingParams]) -> StepPlan:
    infos = [RequestInfo(str(i), 3, given, i, b"", True) for i, given in enumerate(params)]
    return StepPlan(
        step=0,
        requests=tuple(infos),
        starts=(5,) * len(params),
        num_tokens=(1,) * len(params),
        num_samples=(1,) * len(params),
        token_ids=range(-1, -len(params) - 1, -1),
    )


class Step:
    """A step of rows of all kinds, of which every second one or so has a mask."""

    def __init__(self, vocab: int, dtype: torch.dtype, num_rows: int, seed: int) -> None:
        rng, generator = random.Random(seed), torch.Generator().manual_seed(seed)
        outputs = StructuredOutputs(regex="a")
        rows = [i for i in range(num_rows) if rng.random() < 0.6]
        self.params = [
            SamplingParams(structured_outputs=outputs if i in rows else None, **rng.choice(KINDS))
            for i in range(num_rows)
        ]
        self.plan = plan_of(self.params)
        # Rounded, so that many are equal.
        logits = torch.randn(num_rows, vocab, generator=generator) * 2
        self.logits = (logits * 4).round().div(4).to(dtype)
        self.logits[0, 5] = float("nan")
        numbers = rng.sample(range(NUM_MASKS), len(rows))
        flags = torch.rand(NUM_MASKS, -(-vocab // 32) * 32, generator=generator)
        flags = (flags < torch.rand(NUM_MASKS, 1, generator=generator) ** 4).numpy()
        flags[range(NUM_MASKS), rng.choices(range(vocab), k=NUM_MASKS)] = True
        flags[numbers[0]] = 0
        flags[numbers[0], vocab - 1] = 1
        flags[numbers[1]] = 1
        packed = np.packbits(flags, axis=1, bitorder="little").view("<i4")
        # Further apart than they must be, as those of llguidance.
        self.bits = np.concatenate([packed, np.full((NUM_MASKS, 1), -1, np.int32)], 1)
        self.masks = Masks(self.bits, dict(zip(rows, numbers, strict=True)), rows)

    def edits(self, *, is_copied: bool = False) -> gpu_edits.GpuEdits:
        """With the parameters of the step in its buffers, and all tokens -1."""
        num_rows = len(self.params)
        b = StepBuffers(
            max_num_tokens=num_rows,
            max_num_rows=num_rows,
            max_num_blocks=4,
            staging_elements=64 * num_rows,
            device=torch.device("cpu"),
        )
        b.temperatures.copy_(torch.tensor([p.temperature for p in self.params]))
        b.seeds.copy_(torch.arange(num_rows) * 7 - (1 << 40))
        b.sample_positions.copy_(torch.arange(num_rows) + 9)
        b.sampled.fill_(-1)
        results = gumbel.Results(torch.full((2, num_rows), -1), b.result_row.fill_(1))
        logprobs = SimpleNamespace(add_edited=lambda *copies: None) if is_copied else None
        edits = gpu_edits.GpuEdits(b, results, 64, logprobs)
        edits.masks.make_space(NUM_MASKS, self.bits.shape[1])[:] = self.bits
        return edits

    def sample(self, edits: gpu_edits.GpuEdits) -> list[int]:
        """The step's tokens, -1 where a row has no mask."""
        edits.look(self.plan)
        edits.sample(self.plan, self.logits, range(len(self.params)), self.masks)
        found: list[int] = edits._results.tokens[1].tolist()
        assert found == edits._buffers.sampled.tolist()
        assert (edits._results.tokens[0] == -1).all()
        return found

    def reference(self) -> list[int]:
        p = SamplingInputs.from_lists(
            temperature=[p.temperature for p in self.params],
            top_k=[p.top_k for p in self.params],
            top_p=[p.top_p for p in self.params],
            min_p=[p.min_p for p in self.params],
            seeds=[i * 7 - (1 << 40) for i in range(len(self.params))],
            positions=[i + 9 for i in range(len(self.params))],
        )
        rows = self.logits.float().nan_to_num(float("-inf"))
        for row, number in self.masks.numbers.items():
            rows[row, ~flags_of(self.bits[number], rows.shape[1])] = float("-inf")
        tokens = sample(rows, p).tolist()
        return [token if i in self.masks.numbers else -1 for i, token in enumerate(tokens)]


def flags_of(words: np.ndarray, vocab: int) -> Tensor:
    flags = np.unpackbits(words.view(np.uint8), bitorder="little")[:vocab]
    return torch.from_numpy(flags.astype(bool))


@pytest.mark.parametrize(
    ("vocab", "dtype", "seed"),
    [
        (1300, torch.bfloat16, 0),
        (71, torch.float32, 1),
        pytest.param(4500, torch.bfloat16, 2, marks=pytest.mark.nightly),
        pytest.param(4097, torch.float32, 3, marks=pytest.mark.nightly),
    ],
    ids=str,
)
def test_tokens_are_those_of_an_edited_copy(vocab: int, dtype: torch.dtype, seed: int) -> None:
    step = Step(vocab, dtype, 24, seed)
    # Log-probabilities of what rows are sampled from are those of copies.
    copies, direct = step.edits(is_copied=True), step.edits()
    found = step.sample(direct)
    assert found == step.sample(copies) == step.reference()
    assert step.sample(direct) == found, "and once more, of the batch that was kept"
    for row, number in step.masks.numbers.items():
        assert flags_of(step.bits[number], vocab)[found[row]]


def test_a_batch_that_changes_is_sent_anew() -> None:
    step = Step(200, torch.bfloat16, 16, 4)
    edits = step.edits()
    first = step.sample(edits)
    numbers = step.masks.numbers
    gone = next(iter(numbers))
    fewer = {row: NUM_MASKS - 1 - number for row, number in numbers.items() if row != gone}
    step.masks = Masks(step.bits, fewer, list(fewer))
    edits._buffers.sampled.fill_(-1)
    edits._results.tokens.fill_(-1)
    changed = step.sample(edits)
    assert changed == step.reference() != first


def test_rows_with_edits_are_sampled_from_copies() -> None:
    """Of one step: a row with a mask, one with edits as well, and one with neither."""
    step = Step(200, torch.float32, 12, 5)
    row = list(step.masks.numbers)[2]
    params = SamplingParams(temperature=0.0, logit_bias={3: 50.0, 4: 60.0})
    edits_of = LogitEdits.of(params)
    infos = list(step.plan.requests)
    infos[row] = RequestInfo(str(row), 3, params, row, b"", True, edits=edits_of)
    step.plan = StepPlan(
        step=0,
        requests=tuple(infos),
        starts=step.plan.starts,
        num_tokens=step.plan.num_tokens,
        num_samples=step.plan.num_samples,
        token_ids=step.plan.token_ids,
    )
    number = step.masks.numbers[row]
    step.bits[number] = 0
    step.bits[number, 0] = 0b101000  # 3 and 5
    without = step.reference()
    edits = step.edits()
    edits._buffers.temperatures[row] = 0.0
    found = step.sample(edits)
    assert found[row] == 3
    found[row] = without[row]
    assert found == without


def test_a_mask_that_allows_all_changes_no_token() -> None:
    logits = torch.randn(6, 700, generator=torch.Generator().manual_seed(8)) * 3
    rows = [0.0, 0.5, 1.0, 2.0, 1.0, 1.0], [1, 2, 3, 4, 5, 6], [9] * 6
    drawn = [torch.tensor(values) for values in rows]
    tokens = torch.full((6,), -1)
    masked = gumbel.Rows(
        torch.tensor([4, 0, 3], dtype=torch.int32),
        None,
        torch.zeros(3, dtype=torch.int32),
        torch.full((1, 22), -1, dtype=torch.int32),
    )
    gumbel.sample_simple(logits, *drawn, tokens, rows=masked)
    theirs = cpu_tokens(logits, *rows)
    assert tokens.tolist() == [theirs[i] if i in (0, 3, 4) else -1 for i in range(6)]
