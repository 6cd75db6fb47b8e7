"""Shorten GPU test runs that use several processes; most of the time is compilation.

Each file's tests are cut into stretches, one per process. Neighbouring tests share kernels and
models, so two processes seldom need the same kernel at once, and no process is left with a whole
long file. If two processes need the same kernel, one compiles it and the others read it from disk.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

# Files whose single tests take longest, first: whole engines, then many kernels a test. What is not
# named comes last.
_LONGEST_FIRST = (
    "tests/verify",
    "tests/golden",
    "tests/test_",
    "tests/kernels/attention",
    "tests/runner",
    "tests/distributed",
    "tests/property",
    "tests/kernels/mla",
    "tests/kernels/matmul/test_dispatch",
    "tests/kernels/matmul/quantized",
    "tests/kernels/matmul/test_matmul",
    "tests/kernels/recurrent",
    "tests/kernels/moe/test_grouped",
)


def spread(files: Sequence[str], num_workers: int) -> list[int]:
    """An order of tests for ``--dist worksteal``, which cuts it into one stretch per worker. Each
    stretch has a part of every file, slowest tests first. ``files``: the file of each test, in
    pytest's order."""
    stretches: list[list[int]] = [[] for _ in range(num_workers)]
    runs = [[i for i, _ in run] for _, run in groupby(enumerate(files), key=lambda each: each[1])]
    for run in sorted(runs, key=lambda run: _rank(files[run[0]])):
        num_parts = min(num_workers, len(run))
        cuts = [len(run) * part // num_parts for part in range(num_parts + 1)]
        shortest = sorted(stretches, key=len)
        for part, stretch in enumerate(shortest[:num_parts]):
            stretch += run[cuts[part] : cuts[part + 1]]
    return [test for stretch in stretches for test in stretch]


def _rank(file: str) -> int:
    named = (i for i, prefix in enumerate(_LONGEST_FIRST) if file.startswith(prefix))
    return next(named, len(_LONGEST_FIRST))


def compile_once(folder: Path) -> None:
    """Prevent processes with a common ``folder`` and Triton cache from compiling a kernel twice."""
    import fcntl  # not on Windows

    import triton.compiler as compiler

    compile = compiler.compile

    def locked(src: Any, target: Any = None, options: Any = None, **others: Any) -> Any:
        if not hasattr(src, "hash"):  # a file's name
            return compile(src, target=target, options=options, **others)
        form = f"{src.hash()} {target} {sorted((options or {}).items(), key=str)}"
        name = hashlib.sha256(form.encode()).hexdigest()
        with (folder / name).open("w") as file:
            fcntl.flock(file, fcntl.LOCK_EX)  # until it is closed
            return compile(src, target=target, options=options, **others)

    compiler.compile = locked
