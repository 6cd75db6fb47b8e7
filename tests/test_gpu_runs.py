"""How tests/support/gpu_runs.py distributes GPU tests among processes."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise

from tests.support.gpu_runs import spread

SIZES = {"tests/kernels/fused/test_a.py": 40, "tests/golden/test_b.py": 50, "tests/test_c.py": 3}


def test_each_stretch_has_a_part_of_every_file_and_the_longest_tests_first() -> None:
    files = [name for name, n in SIZES.items() for _ in range(n)]
    order = spread(files, 10)
    assert sorted(order) == list(range(len(files)))
    size, rest = divmod(len(files), 10)
    assert rest == 3
    # As xdist's worksteal cuts it.
    begins = [i * size + max(0, i - 7) for i in range(11)]
    for begin, end in pairwise(begins):
        found = Counter(files[i] for i in order[begin:end])
        assert found["tests/kernels/fused/test_a.py"] in (3, 4, 5)
        assert found["tests/golden/test_b.py"] in (5, 6)
    assert [files[i] for i in order[:5]] == ["tests/golden/test_b.py"] * 5
    assert order[:5] == list(range(order[0], order[0] + 5))


def test_few_tests_of_many_processes() -> None:
    assert sorted(spread(["tests/test_c.py"] * 3, 8)) == [0, 1, 2]
