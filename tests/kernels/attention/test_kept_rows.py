"""Each kept token is a row of one query, over the context up to itself."""

from __future__ import annotations

import random

import torch

from pagespec.kernels.attention.kept_rows import kept_rows


def test_rows_are_those_of_the_definition() -> None:
    rng = random.Random(3)
    for _ in range(100):
        num_rows = rng.randrange(1, 6)
        lengths = [rng.choice([0, 1, 1, 5, 9]) for _ in range(num_rows)]
        contexts = [length + rng.randrange(20) for length in lengths]
        tables = rng.sample(range(30), num_rows)
        num_tokens, num_padding = sum(lengths), rng.randrange(3)
        owners = [row for row, length in enumerate(lengths) for _ in range(length)]
        offsets = [i for length in lengths for i in range(length)]
        kept = sorted(rng.sample(range(num_tokens), rng.randrange(num_tokens + 1)))
        # Padding repeats the last one, and is 0 if there is none.
        padded = kept + [kept[-1] if kept else 0] * num_padding
        if not padded:
            continue
        starts = [sum(lengths[:row]) for row in range(num_rows + 1)]
        found = kept_rows(
            torch.tensor(padded),
            *(torch.tensor(x, dtype=torch.int32) for x in (starts, contexts, tables)),
        )
        real = kept or ([0] if num_tokens else [])  # attended, and never read
        num_real = len(real)
        assert found[0].tolist() == [min(i, num_real) for i in range(len(padded) + 1)]
        expected = [contexts[owners[t]] - lengths[owners[t]] + offsets[t] + 1 for t in real]
        assert found[1].tolist() == expected + [0] * (len(padded) - num_real)
        assert found[2].tolist()[:num_real] == [tables[owners[t]] for t in real]
        assert all(tensor.dtype == torch.int32 for tensor in found)
