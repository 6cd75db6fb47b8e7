"""Truncated sampling by the Triton kernel, under the interpreter, against the torch sampler."""

from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor

from pagespec.kernels.sampling.sampler import sample

pytest.importorskip("triton")
from pagespec.kernels.sampling.top_k_top_p import sample_truncated
from tests.kernels.sampling.kept import Row, draw, kept, reference_inputs, reference_kept, staged

INF = float("inf")
TOP_KS = [0, -1, 1, 2, 7, 50, 400, 1999, 2000, 1 << 40]
TOP_PS = [1.0, 1.0, 0.9999, 0.97, 0.9, 0.51, 0.13, 1e-3, 1e-30]
MIN_PS = [0.0, 0.0, 0.0, 1e-6, 0.01, 0.123, 0.7, 1.0]
TEMPERATURES = [0.0, 1.0, 0.7, 0.3, 1.7, 10.0, 1e-3, 1e-30]
SMALL = {"tile": 1024, "num_warps": 4}


def kinds(seed: int, vocab: int) -> dict[str, Tensor]:
    g = torch.Generator().manual_seed(seed)
    normal = torch.randn(vocab, generator=g) * 3
    holes = normal.clone()
    holes[torch.rand(vocab, generator=g) < 0.6] = -INF
    peaked = normal.clone()
    peaked[seed % vocab] = 40.0
    return {
        "normal": normal,
        "bf16": normal.bfloat16().float(),
        "coarse": (normal * 2).round() / 2,
        "holes": holes,
        "coarse holes": (holes * 2).round() / 2,
        "flat": normal * 1e-4,
        "equal": torch.full((vocab,), 1.5),
        "two values": (normal > 1).float() * 2,
        "one finite": torch.full((vocab,), -INF).index_fill(0, torch.tensor([vocab // 2]), 3.0),
        "peaked": peaked,
        "wide": normal * 1e4,
        "big": normal + 3e4,
    }


# By day one vocabulary for each kind of logits, by night both.
@pytest.mark.parametrize(
    ("kind", "seed"),
    [
        pytest.param(kind, seed, marks=() if i % 2 == seed else pytest.mark.nightly)
        for i, kind in enumerate(kinds(0, 8))
        for seed in range(2)
    ],
)
def test_keeps_and_draws_what_the_torch_sampler_does(kind: str, seed: int) -> None:
    rng = random.Random(f"{kind} {seed}")
    vocab = [2000, 1537][seed]
    rows = [
        Row(
            rng.choice(TEMPERATURES),
            rng.choice(TOP_KS),
            rng.choice(TOP_PS),
            rng.choice(MIN_PS),
            rng.getrandbits(64) - (1 << 63),
            rng.choice([0, 5, 1 << 20, (1 << 35) + 3]),
        )
        for _ in range(4)
    ]
    rows.append(Row(1.0, 5, 0.9))
    logits = torch.stack([kinds(seed * 100 + i, vocab)[kind] for i in range(len(rows))])
    p = reference_inputs(rows)
    places = staged(rows)[0].tolist()
    mine = kept(logits, rows)
    # Greedy rows do not truncate, so what the reference makes of temperature 0 does not matter.
    theirs = reference_kept(logits, p)[places]
    assert len(mine) == len(places) > 0
    for place, my_row, their_row in zip(places, mine, theirs, strict=True):
        assert torch.equal(my_row, their_row), (rows[place], my_row.sum(), their_row.sum())
    tokens = sample(logits, p).tolist()
    expected = [token if place in places else -7 for place, token in enumerate(tokens)]
    assert draw(logits, rows, **SMALL).tolist() == expected


@pytest.mark.parametrize(
    "dtype", [torch.float32, pytest.param(torch.bfloat16, marks=pytest.mark.nightly)]
)
def test_the_tile_in_use_and_a_narrow_dtype(dtype: torch.dtype) -> None:
    logits = (torch.randn(6, 5000, generator=torch.Generator().manual_seed(3)) * 3).to(dtype)
    rows = [
        Row(1.0, 50, 0.9, 0.0, 1, 1),
        Row(0.8, 0, 0.95, 0.0, 2, 2),
        Row(1.0, 20, 1.0, 0.05, 3, 3),
        Row(0.6, 0, 1.0, 0.1, 4, 4),
        Row(2.0, 4000, 0.999, 0.0, 5, 5),
        Row(1.5, 0, 0.3, 0.0, 6, 6),
    ]
    p = reference_inputs(rows)
    mine = kept(logits, rows, tile=4096)
    assert torch.equal(mine, reference_kept(logits, p))
    assert 1 < mine[5].sum() < mine[4].sum() < 5000
    found = draw(logits, rows)
    assert torch.equal(found, sample(logits, p))
    assert torch.equal(found, draw(logits, rows, tile=512, num_warps=4))


def test_ties_go_to_the_lowest_ids() -> None:
    logits = torch.zeros(4, 1000)
    logits[:, 10] = -1.0
    logits[2:, 700] = 1.0
    rows = [Row(top_k=30), Row(top_p=0.25), Row(top_k=4), Row(top_k=4, top_p=0.7)]
    ids = [mask.nonzero().flatten().tolist() for mask in kept(logits, rows, tile=256)]
    assert ids[0] == [*range(10), *range(11, 31)]
    # 999 + exp(-1) in all, a quarter of which is 249.84.
    assert ids[1] == [*range(10), *range(11, 251)]
    assert ids[2] == [0, 1, 2, 700]
    # e + 3 in all; 0.7 of it is 4.003, which e + 1 = 3.7 does not reach and e + 2 does.
    assert ids[3] == [0, 1, 700]


def test_a_group_of_which_a_tie_keeps_a_part_is_drawn_by_that_part() -> None:
    logits = torch.zeros(24, 900)
    rows = [Row(top_k=540, seed=seed) for seed in range(24)]
    tokens = draw(logits, rows, tile=512, num_warps=4)
    assert torch.equal(tokens, sample(logits, reference_inputs(rows)))
    assert tokens.max() < 540
    # The third group keeps 28 tokens of 256: one draw expected, 8 if it weighed what others do.
    assert (tokens >= 512).sum() <= 4


def test_top_p_is_a_share_of_what_top_k_keeps() -> None:
    logits = torch.log(torch.tensor([[0.5, 0.3, 0.15, 0.05]])).repeat(2, 1)
    found = kept(logits, [Row(top_k=2, top_p=0.62), Row(top_p=0.62)], tile=16)
    # 0.5 of 0.8 is 0.625.
    assert found.tolist() == [[True, False, False, False], [True, True, False, False]]


def test_only_rows_that_truncate_are_staged() -> None:
    rows = [
        Row(),
        Row(top_k=3),
        Row(temperature=0.0, top_k=3, top_p=0.5, min_p=0.5),
        Row(top_p=0.999),
        Row(top_k=-1),
        Row(min_p=1e-3),
    ]
    assert staged(rows)[0].tolist() == [1, 3, 5]
    assert staged(rows[:1]).shape == (4, 0)


def test_a_row_depends_on_nothing_beside_it_and_other_places_stay() -> None:
    logits = torch.randn(5, 3000, generator=torch.Generator().manual_seed(9)) * 2
    rows = [
        Row(1.0, 40, 0.9, 0.0, 11, 4),
        Row(0.9, 0, 0.8, 0.0, 12, 5),
        Row(1.2, 0, 0.99, 0.02, 13, 6),
        Row(0.7, 10, 1.0, 0.0, 14, 7),
        Row(1.0, 100, 0.5, 0.0, 15, 8),
    ]
    together = draw(logits, rows, **SMALL).tolist()
    alone = [int(draw(logits[i : i + 1], rows[i : i + 1], **SMALL)[0]) for i in range(5)]
    assert together == alone == sample(logits, reference_inputs(rows)).tolist()
    some = draw(logits, rows, only=[1, 4], **SMALL).tolist()
    assert some == [-7, together[1], -7, -7, together[4]]


def test_a_place_below_zero_is_no_row() -> None:
    logits, rows = torch.zeros(2, 300), [Row(top_k=3), Row(top_k=3)]
    fields = staged(rows)
    fields[0, 0] = -1
    p = reference_inputs(rows)
    sampled = torch.tensor([-5, -6])
    sample_truncated(logits, fields.reshape(-1), p.temperature, p.seeds, p.positions, sampled)
    assert sampled[0] == -5
    assert 0 <= sampled[1] < 3


def test_a_temperature_that_rounds_to_zero_is_greedy_and_bad_logits_give_a_token() -> None:
    logits = torch.zeros(4, 600)
    logits[0, [333, 400]] = 2.0
    logits[1] = -INF
    logits[2] = float("nan")
    logits[3, 55] = INF
    rows = [Row(1e-50, 5, 0.9), *[Row(1.0, 5, 0.9)] * 3]
    found = draw(logits, rows, **SMALL).tolist()
    assert found == [333, 0, 0, 55]
    # The torch sampler chooses 0 in the last row too: infinity less infinity is no number.
    assert sample(logits, reference_inputs(rows))[:3].tolist() == found[:3]
