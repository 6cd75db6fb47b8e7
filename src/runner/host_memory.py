"""Available host memory, within the machine and the limits of a container.

``/proc/meminfo`` describes the whole machine. The control group of a container (cgroup, versions 1
and 2), and every group around it, has its own limits. Beyond a limit the container is killed.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

# (limits, usage, part of the usage that is file cache and dropped first) of the two versions.
# Beyond "high", a group is slowed down until it is unusable.
_FILES_V2 = (("memory.max", "memory.high"), "memory.current", "inactive_file")
_FILES_V1 = (("memory.limit_in_bytes",), "memory.usage_in_bytes", "total_inactive_file")


def available_bytes(root: Path = Path("/")) -> int:
    """The minimum of the available memory of the machine and of every control group around this
    process.

    Args:
        root: root of the file system (tests pass another).
    """
    available = _machine_bytes(root)
    for folder, is_v2 in control_groups(root, "memory"):
        limits, usage, cache = _FILES_V2 if is_v2 else _FILES_V1
        used = _number(folder / usage)
        if used is None:
            continue
        used -= _field(folder / "memory.stat", cache) or 0
        for limit in limits:
            most = _number(folder / limit)
            if most is not None:
                available = min(available, most - used)
    return max(0, available)


def _machine_bytes(root: Path) -> int:
    kib = _field(root / "proc/meminfo", "MemAvailable:")
    if kib is None:  # not Linux
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return kib * 1024


def control_groups(root: Path, controller: str) -> Iterator[tuple[Path, bool]]:
    """The folders of this process's groups with this controller, from its own to the outermost
    visible one; and whether they are of version 2."""
    own: dict[str, str] = {}  # by version
    for line in _lines(root / "proc/self/cgroup"):
        number, controllers, path = line.split(":", 2)
        if number == "0" and not controllers:
            own["cgroup2"] = path
        elif controller in controllers.split(","):
            own["cgroup"] = path
    for line in _lines(root / "proc/self/mountinfo"):
        mount, _, filesystem = line.partition(" - ")
        kind, *_, options = filesystem.split(" ")
        if kind not in own or (kind == "cgroup" and controller not in options.split(",")):
            continue
        mounted, place = mount.split(" ")[3:5]
        top = root / place.lstrip("/")
        # A container may see its own group as the root, under its path on the host.
        inside = Path(own[kind]).relative_to("/")
        if Path(own[kind]).is_relative_to(mounted):
            inside = Path(own[kind]).relative_to(mounted)
        for folder in (inside, *inside.parents):
            yield top / folder, kind == "cgroup2"


def _lines(file: Path) -> list[str]:
    try:
        return file.read_text().splitlines()
    except OSError:
        return []


def _number(file: Path) -> int | None:
    """None if there is no such file, or if it contains "max"."""
    text = "".join(_lines(file)).strip()
    return int(text) if text.isdigit() else None


def _field(file: Path, name: str) -> int | None:
    for line in _lines(file):
        words = line.split()
        if words[:1] == [name]:
            return int(words[1])
    return None
