"""Available host memory, read from the files of several kinds of machines and containers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from pagespec.runner.host_memory import available_bytes

GIB = 1 << 30
V2 = "30 20 0:26 {} /sys/fs/cgroup rw - cgroup2 cgroup2 rw,nsdelegate"
V1 = "32 31 0:29 {} /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory"


def machine(folder: Path, files: dict[str, object]) -> Path:
    """A file system of a machine with 64 GiB available; values in ``files`` are GiB."""
    files = {"proc/meminfo": f"MemTotal: 1 kB\nMemAvailable: {64 << 20} kB\n"} | files
    for name, content in files.items():
        file = folder / name
        file.parent.mkdir(parents=True, exist_ok=True)
        is_number = isinstance(content, (int, float))
        file.write_text(f"{int(content * GIB) if is_number else content}\n")
    return folder


def v2(root: str, own: str, files: dict[str, object]) -> dict[str, object]:
    inside = {f"sys/fs/cgroup/{name}": content for name, content in files.items()}
    return {"proc/self/cgroup": f"0::{own}", "proc/self/mountinfo": V2.format(root)} | inside


def v1(root: str, own: str, files: dict[str, object]) -> dict[str, object]:
    inside = {f"sys/fs/cgroup/memory/{name}": content for name, content in files.items()}
    groups = f"5:cpu:/other\n4:memory,hugetlb:{own}\n0::/x"
    mounts = f"31 1 0:1 / /sys/fs/cgroup/cpu rw - cgroup cgroup rw,cpu\n{V1.format(root)}"
    return {"proc/self/cgroup": groups, "proc/self/mountinfo": mounts} | inside


STAT = f"anon 1\ninactive_file {2 * GIB}\nactive_file 5"
STAT_V1 = f"inactive_file 1\ntotal_inactive_file {2 * GIB}"


@pytest.mark.parametrize(
    ("files", "available_gib"),
    [
        ({}, 64),
        (v2("/", "/", {}), 64),
        (v2("/", "/", {"memory.max": "max", "memory.current": 3}), 64),
        (v2("/", "/", {"memory.max": 8, "memory.current": 3}), 5),
        (v2("/", "/", {"memory.max": 8, "memory.current": 3, "memory.stat": STAT}), 7),
        (v2("/", "/", {"memory.max": 80, "memory.current": 3}), 64),
        (v2("/", "/", {"memory.max": 8, "memory.high": 6, "memory.current": 3}), 3),
        (v2("/", "/", {"memory.max": 2, "memory.current": 3}), 0),
        (v2("/", "/", {"memory.max": "junk", "memory.current": 3}), 64),
        (v2("/", "/", {"memory.max": 8}), 64),
        # The limit is that of a group around ours, and what the group has in all counts.
        (
            v2("/", "/a/b", {"a/b/memory.max": "max", "a/b/memory.current": 1,
                             "a/memory.max": 8, "a/memory.current": 6}), 2,
        ),
        (
            v2("/", "/a/b", {"a/b/memory.max": 3, "a/b/memory.current": 1,
                             "a/memory.max": 8, "a/memory.current": 1}), 2,
        ),
        # A container that sees its own group at the top, with its path on the host or without.
        (v2("/docker/x", "/docker/x", {"memory.max": 8, "memory.current": 3}), 5),
        (v2("/docker/x", "/docker/x/in", {"memory.max": 8, "memory.current": 3}), 5),
        (v2("/", "/docker/x", {"memory.max": 8, "memory.current": 3}), 5),
        (v2("/../..", "/", {"memory.max": 8, "memory.current": 3}), 5),
        (v1("/", "/", {"memory.limit_in_bytes": "9223372036854771712",
                       "memory.usage_in_bytes": 3}), 64),
        (v1("/", "/", {"memory.limit_in_bytes": 8, "memory.usage_in_bytes": 3}), 5),
        (v1("/", "/", {"memory.limit_in_bytes": 8, "memory.usage_in_bytes": 3,
                       "memory.stat": STAT_V1}), 7),
        (v1("/", "/a/b", {"a/memory.limit_in_bytes": 8, "a/memory.usage_in_bytes": 3}), 5),
        (v1("/docker/x", "/docker/x", {"memory.limit_in_bytes": 8, "memory.usage_in_bytes": 3}), 5),
    ],
)  # fmt: skip
def test_the_least_of_machine_and_groups_is_available(
    tmp_path: Path, files: dict[str, object], available_gib: int
) -> None:
    assert available_bytes(machine(tmp_path, files)) == available_gib * GIB


def test_without_files_it_is_the_machines_memory(tmp_path: Path) -> None:
    assert available_bytes(tmp_path) > 0
    assert 0 < available_bytes() <= available_bytes(tmp_path)


def test_the_cpu_cache_is_sized_by_it(free_memory: Callable[[int], None]) -> None:
    """In a small container on a large machine."""
    from pagespec import LLM
    from tests.support.models import tiny_model

    free_memory(1 << 20)
    small = LLM(tiny_model("llama"), compile="eager").num_blocks
    free_memory(1 << 21)
    large = LLM(tiny_model("llama"), compile="eager").num_blocks
    assert 0 < small < large
