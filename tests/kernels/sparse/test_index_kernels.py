"""Top-k indexers under Triton's interpreter: against the CPU's, and bit against bit."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from torch import Tensor

from pagespec.kernels import ops
from pagespec.kernels.sparse import index_kernels
from pagespec.kernels.sparse.index_kernels import choose_kernel
from tests.kernels.sparse.test_indexer import NUM_CHOSEN, ROWS, SHAPES, choose
from tests.support.apart import run_apart
from tests.support.paged import Batch, Rows, Shape, make_batch, rescheduled

pytest.importorskip("triton")


indexed = partial(choose, by=index_kernels.index_topk)


def stored(batch: Batch) -> Batch:
    """With its new keys in the cache."""
    key, value, k_cache, v_cache, slots = batch.store
    ops.kv_store(key, value, k_cache, v_cache, slots)
    return batch


# With one head half of the scores are 0, and of equal scores a CPU takes others. The interpreter
# multiplies no bfloat16.
@pytest.mark.parametrize("shape", [*SHAPES[:2], replace(SHAPES[3], dtype=torch.float16)], ids=str)
@pytest.mark.parametrize("rows", ROWS[:3], ids=["mixed", "decode", "empty rows"])
def test_chooses_as_on_a_cpu(shape: Shape, rows: Rows) -> None:
    batches = [make_batch(rows, shape) for _ in range(2)]
    chosen, expected = [
        by(batch.attend, batch.store[0][:, 0], batch.store[4])
        for by, batch in zip((indexed, choose), batches, strict=True)
    ]
    assert torch.equal(batches[0].store[2].nan_to_num(9.0), batches[1].store[2].nan_to_num(9.0))
    for found, wanted in zip(chosen.tolist(), expected.tolist(), strict=True):
        positions = sorted(at for at in wanted if at >= 0)
        assert found == positions + [-1] * (NUM_CHOSEN - len(positions))


@pytest.mark.parametrize("shape", SHAPES[:2], ids=str)
def test_schedules_choose_alike(shape: Shape) -> None:
    """One prefill; chunks; decodes beside one another and alone; scored in parts, by few programs
    and by many."""
    length = 75
    batch = stored(make_batch([(0, length)], shape, num_padding=0))
    key, slots = batch.store[0][:, 0], batch.store[4]
    whole = indexed(batch.attend, key, slots)

    def again(chunks: list[tuple[int, int]], **changes: int) -> Tensor:
        tokens = torch.cat([torch.arange(a, b) for a, b in chunks])
        return indexed(rescheduled(batch, chunks), key[tokens], slots[tokens], **changes)

    cuts = list(pairwise([0, 1, 8, 59, 60, length]))
    assert torch.equal(again(cuts), whole)
    assert torch.equal(again(cuts, max_score_bytes=7 * 4 * 96), whole)
    assert torch.equal(again(cuts, max_score_bytes=1), whole)
    tokens = [0, 19, 20, 21, 40, 63, 64, 74]
    decodes = [(p, p + 1) for p in tokens]
    assert torch.equal(again(decodes[::-1]), whole[tokens[::-1]])
    assert torch.equal(again(decodes[-1:]), whole[tokens[-1:]])


def chosen_of(scores: Tensor, num_chosen: int, tile: int) -> Tensor:
    """What is chosen of rows of scores ``[n, width]``, of which the last position is in view."""
    num, width = scores.shape
    bits = scores.view(torch.int32)
    image = torch.where(scores == 0, 0, bits ^ ((bits >> 31) & 0x7FFFFFFF))
    chosen = torch.full((num, num_chosen), -9, dtype=torch.int32)
    starts = torch.arange(num + 1, dtype=torch.int32)
    contexts = torch.full((num,), width, dtype=torch.int32)
    choose_kernel[(num,)](
        image, chosen, starts, contexts, 0, num, width, NUM_CHOSEN=num_chosen, TILE=tile, PDL=False
    )
    return chosen


def lowest_of_equals(row: Tensor, num_chosen: int) -> list[int]:
    order = sorted(range(len(row)), key=lambda at: (-float(row[at]), at))
    return sorted(order[:num_chosen])


pytestmark = pytest.mark.usefixtures("poisoned")

_SCORES: dict[str, Callable[[int], Tensor]] = {
    "distinct": lambda n: torch.randn(3, n),
    "few values": lambda n: torch.randint(-2, 3, (4, n)).float(),
    "zeros of both signs": lambda n: torch.randn(3, n).sign() * torch.zeros(3, n),
    "all but one equal": lambda n: torch.where(torch.arange(n) == n - 1, 1.0, 0.5).expand(2, n),
    "infinite": lambda n: torch.where(torch.rand(2, n) < 0.3, torch.inf, -torch.inf),
    "neighbours": lambda n: (torch.randint(0, 40, (3, n), dtype=torch.int32) + (127 << 23)).view(
        torch.float32
    ),
    "all negative": lambda n: -torch.rand(2, n),
}


@pytest.mark.parametrize("name", _SCORES)
@pytest.mark.parametrize(
    ("width", "num_chosen", "tile"), [(75, 20, 128), (75, 20, 32), (64, 63, 16)]
)
def test_of_equal_scores_the_first_are_taken(
    name: str, width: int, num_chosen: int, tile: int
) -> None:
    torch.manual_seed(1)
    scores = _SCORES[name](width).contiguous()
    chosen = chosen_of(scores, num_chosen, tile)
    for row, found in zip(scores, chosen.tolist(), strict=True):
        assert found == lowest_of_equals(row, num_chosen)


def test_more_than_any_context_has_are_all() -> None:
    batch = make_batch([(3, 4), (0, 1)], SHAPES[0])
    chosen = indexed(batch.attend, batch.store[0][:, 0], batch.store[4], 500)
    for found, last in zip(chosen.tolist(), [3, 4, 5, 6, 0, -1, -1, -1], strict=True):
        assert found == [*range(last + 1), *[-1] * (499 - last)]


def test_the_kernels_compile_for_hopper() -> None:
    """At the shapes of DeepSeek-V3.2."""
    script = Path(__file__).with_name("compile_index.py")
    for name, built in json.loads(run_apart(str(script))).items():
        assert built["shared"] <= 227 << 10, name
        # Of latents as without an indexer, outside of the loop over tiles.
        assert built["spilled"] <= (300 if name.startswith("latents") else 0), name
