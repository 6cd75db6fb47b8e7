"""The shapes to which decode and mixed steps are padded."""

from __future__ import annotations

from itertools import pairwise

from pagespec.runner.gpu.cuda_graphs import default_buckets, mixed_shapes
from pagespec.runner.layout import StepShape


def test_default_buckets() -> None:
    assert default_buckets(1) == (2,)
    assert default_buckets(5) == (2, 4, 5)
    assert default_buckets(256) == (2, 4, 8, 16, 32, 64, 96, 128, 192, 256)
    assert all(b <= 2 * a for a, b in pairwise(default_buckets(2048)))


def test_shapes_of_many_tokens_per_sample_are_long() -> None:
    shapes = [(1024, 128), (1024, 129), (512, 8), (8192, 256)]
    forms = [StepShape.mixed(*sizes).lengthened().form for sizes in shapes]
    assert forms == ["long", "mixed", "mixed", "long"]
    assert StepShape.decode(2048).lengthened() == StepShape.decode(2048)
    assert StepShape.verify(2048).lengthened() == StepShape.verify(2048)


def test_mixed_shapes_reach_the_budget_and_all_rows() -> None:
    shapes = mixed_shapes(5000, 100)
    assert max(s.num_tokens for s in shapes) == 5000
    assert {s.num_rows for s in shapes} == {8, 100}
    assert mixed_shapes(1, 1) == (StepShape.mixed(2, 2),)
    many = sorted(s.num_tokens for s in mixed_shapes(8192, 512) if s.num_rows == 512)
    assert many == [64, 256, 512, 768, 1024, 1280, 1536, 2048, 4096, 8192]
    assert sorted(s.num_tokens for s in mixed_shapes(8192, 512) if s.num_rows == 8) == [
        *(64, 256, 512, 1024, 2048)
    ]
