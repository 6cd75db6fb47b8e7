"""Random choices of positions for the queries of a batch, and float64 attention to them."""

from __future__ import annotations

import torch
from torch import Tensor

from tests.support.paged import Batch, Rows, Shape


def choice_of(positions: list[int], num_chosen: int) -> Tensor:
    """int32 ``[n, num_chosen]``, in order, -1 behind the last; a position's is always the same."""
    chosen = torch.full((len(positions), num_chosen), -1, dtype=torch.int32)
    for line, position in zip(chosen, positions, strict=True):
        order = torch.randperm(position + 1, generator=torch.Generator().manual_seed(position))
        found = order[:num_chosen].sort().values
        line[: len(found)] = found
    return chosen


def choice_of_rows(rows: Rows, num_chosen: int, num_padding: int = 3) -> Tensor:
    positions = [p for start, n in rows for p in range(start, start + n)]
    return choice_of([*positions, *[-1] * num_padding], num_chosen)


def float64_chosen(batch: Batch, rows: Rows, shape: Shape, chosen: Tensor) -> Tensor:
    """``[num_tokens, Hq, Dv]``."""
    query, sinks = batch.attend[0], batch.attend[10]
    outputs, token = [], 0
    for (_, n), (keys, values) in zip(rows, batch.histories, strict=True):
        for _ in range(n):
            at = chosen[token][chosen[token] >= 0].long().to(keys.device)
            grouped = query[token].double().view(shape.hkv, -1, shape.dk)
            scores = torch.einsum("hgd,chd->hgc", grouped, keys[at].double()) * shape.dk**-0.5
            if shape.softcap:
                scores = shape.softcap * torch.tanh(scores / shape.softcap)
            if sinks is not None:
                scores = torch.cat([scores, sinks.double().view(shape.hkv, -1, 1)], -1)
            shares = scores.softmax(-1)[..., : len(at)]
            mixed = torch.einsum("hgc,chd->hgd", shares, values[at].double())
            outputs.append(mixed.reshape(shape.hq, -1))
            token += 1
    return torch.stack(outputs)
