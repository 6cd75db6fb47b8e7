"""Top-k indexers on a CPU: the positions of the highest scores, the same in any step."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from pagespec.kernels import ops
from pagespec.kernels.attention import cpu_invariant
from pagespec.kernels.sparse import indexer
from tests.support.paged import Rows, Shape, check_positions, make_batch

NUM_HEADS, NUM_CHOSEN = 6, 20
# Of index keys: one head, and values that nothing reads.
SHAPES = [
    Shape(hq=NUM_HEADS, hkv=1, dk=16, dv=1, block_size=4),
    Shape(hq=64, hkv=1, dk=128, dv=1, block_size=16),
    Shape(hq=1, hkv=1, dk=8, dv=1, block_size=1),
    Shape(hq=NUM_HEADS, hkv=1, dk=32, dv=1, dtype=torch.bfloat16),
]
ROWS: list[Rows] = [
    [(0, 5), (17, 1), (30, 9), (3, 1), (0, 1), (99, 1), (40, 2)],
    [(1, 1), (200, 1), (3, 1), (63, 1), (64, 1), (65, 1), (19, 1), (20, 1)],
    [(5, 1), (0, 0), (0, 44), (0, 0)],
    [(130, 300), (0, 2)],
]


def weights_of(query: Tensor) -> Tensor:
    """Made of each token's query, so that they are the token's in any step."""
    return query.float().sum(-1).cos()


def choose(
    batch: tuple,
    key: Tensor,
    slots: Tensor,
    num_chosen: int = NUM_CHOSEN,
    by: Callable[..., Tensor] = ops.index_topk,
    **options: int,
) -> Tensor:
    """What ``by`` chooses, of the arguments of ``paged_attention``."""
    query, cache, _, starts, contexts, tables, table_rows, scale, *_ = batch
    of_step = (cache, slots, starts, contexts, tables, table_rows)
    return by(query, key, weights_of(query), *of_step, scale, num_chosen, **options)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("rows", ROWS, ids=["mixed", "decode", "empty rows", "long chunk"])
def test_chooses_the_highest_scores_in_view(shape: Shape, rows: Rows) -> None:
    batch = make_batch(rows, shape)
    key, _, _, _, slots = batch.store
    chosen = choose(batch.attend, key[:, 0], slots)
    assert chosen.dtype == torch.int32
    assert chosen.shape == (len(key), NUM_CHOSEN)
    assert (chosen[batch.num_tokens :] == -1).all()
    query = batch.attend[0].double()
    weights = weights_of(batch.attend[0]).double()
    token = 0
    for (start, n), (keys, _) in zip(rows, batch.histories, strict=True):
        for position in range(start, start + n):
            products = torch.relu(query[token] @ keys[: position + 1, 0].double().T)
            scores = weights[token] @ products * shape.dk**-0.5
            found = [at for at in chosen[token].tolist() if at >= 0]
            count = min(NUM_CHOSEN, position + 1)
            assert len(set(found)) == len(found) == count
            # As high as the highest, but for rounding.
            highest = scores.topk(count).values
            torch.testing.assert_close(
                scores[found].sort(descending=True).values, highest, rtol=1e-5, atol=1e-5
            )
            token += 1


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_position_has_the_same_scores_in_any_step(
    shape: Shape, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To the bit, and so the same choice."""

    def scores(attention: tuple) -> Tensor:
        query, cache, _, starts, contexts, tables, table_rows, scale, *_ = attention
        layout = cpu_invariant.build_layout(cache, starts, contexts, tables, table_rows)
        out = torch.zeros(len(query), 320)
        for gather in layout.gathers:
            keys = cpu_invariant.gathered("index keys", cache, gather)
            for group in gather.groups:
                given = query[group.tokens]
                found = indexer._scores(given, weights_of(given), keys, group, scale)
                visible = indexer._num_visible(group)
                hidden = torch.arange(found.shape[1]) >= visible[:, None]
                # What is in view, each score to the bit.
                found = found.masked_fill(hidden, 0.0)
                assert found.shape[1] <= 320 or bool(hidden[:, 320:].all())
                out[group.tokens] = torch.nn.functional.pad(found, (0, 320))[:, :320]
        return out

    # In many parts of a tile or two, as long contexts are.
    for num_elements in (indexer._PRODUCT_ELEMENTS, 1 << 12):
        monkeypatch.setattr(indexer, "_PRODUCT_ELEMENTS", num_elements)
        check_positions(scores, shape, 37)


def test_equal_scores_are_told_apart_by_what_is_in_view() -> None:
    torch.manual_seed(0)
    visible = torch.tensor([100, 64, 20, 7, 21])
    scores = torch.randint(0, 4, (5, 192)).float()
    chosen = indexer._topk(scores, visible, NUM_CHOSEN)
    for row, at, n in zip(scores, chosen, visible.tolist(), strict=True):
        if n > NUM_CHOSEN:
            expected = row[:n].topk(NUM_CHOSEN).indices
            assert set(at.tolist()) == set(expected.tolist())
        else:
            assert at[:n].tolist() == list(range(n))


@pytest.mark.parametrize("has_sinks", [False, True])
@pytest.mark.parametrize("rows", ROWS, ids=["mixed", "decode", "empty rows", "long chunk"])
def test_attention_sees_what_was_chosen_and_no_more(rows: Rows, has_sinks: bool) -> None:
    shape = Shape(hq=6, hkv=2, dk=16, dv=8, has_sinks=has_sinks)
    batch = make_batch(rows, shape)
    ops.kv_store(*batch.store)
    query, *_, sinks = batch.attend
    chosen = torch.full((len(query), NUM_CHOSEN), -1, dtype=torch.int32)
    positions = [p for start, n in rows for p in range(start, start + n)]
    for token, position in enumerate(positions):
        at = torch.randperm(position + 1)[:NUM_CHOSEN]
        chosen[token, : len(at)] = at
    out = ops.paged_attention(*batch.attend, indices=chosen)
    token = 0
    for (_, n), (keys, values) in zip(rows, batch.histories, strict=True):
        for _ in range(n):
            at = chosen[token][chosen[token] >= 0].long()
            grouped = query[token].double().view(2, 3, 16)
            scores = torch.einsum("hgd,chd->hgc", grouped, keys[at].double()) * 16**-0.5
            if sinks is not None:
                scores = torch.cat([scores, sinks.double().view(2, 3, 1)], -1)
            shares = scores.softmax(-1)[..., : len(at)]
            expected = torch.einsum("hgc,chd->hgd", shares, values[at].double()).view(6, 8)
            torch.testing.assert_close(out[token].double(), expected, rtol=1e-5, atol=1e-5)
            token += 1
    assert (out[token:] == 0).all()
