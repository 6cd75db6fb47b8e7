"""On-disk cache of results that every start would otherwise recompute, with atomic writes."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import stat
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

try:
    import fcntl
except ImportError:  # Windows has no flock
    fcntl = None  # type: ignore[assignment]

_LOCK = "lock"
_ABANDONED_S = 24 * 3600.0
_WRITABLE_BY_OTHERS = stat.S_IWGRP | stat.S_IWOTH


def cache_root(cache_dir: str | os.PathLike[str] | None = None) -> Path:
    """``cache_dir``, else ``$PAGESPEC_CACHE``, else ``~/.cache/pagespec``."""
    chosen = cache_dir or os.environ.get("PAGESPEC_CACHE") or Path.home() / ".cache" / "pagespec"
    return Path(chosen)


def write_whole(file: Path, content: bytes) -> None:
    """Write ``file`` atomically (by one rename), and create its folder if needed. Only this user
    may read or write the file.

    Raises:
        OSError: the disk is full, or the folder may not be written to.
    """
    file.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(dir=file.parent, delete=False) as work:
        work.write(content)
    Path(work.name).replace(file)


def write_json(folder: Path, key: str, data: object) -> None:
    """Write ``KEY.json`` with :func:`write_whole`: one line with the digest of key and body, then
    the body.

    Raises:
        OSError: as for :func:`write_whole`.
    """
    body = json.dumps(data, separators=(",", ":")).encode()
    write_whole(folder / f"{key}.json", _digest(key, body) + b"\n" + body)


def read_json(folder: Path, key: str) -> Any:
    """The data that :func:`write_json` wrote. File owner and digest are checked before parsing.

    Raises:
        PermissionError: another user could have written the file.
        ValueError: the file is damaged, or belongs to another key.
        OSError: it cannot be read; FileNotFoundError if it does not exist.
    """
    with (folder / f"{key}.json").open("rb") as opened:
        status = os.fstat(opened.fileno())
        is_ours = not hasattr(os, "getuid") or status.st_uid == os.getuid()
        if not is_ours or status.st_mode & _WRITABLE_BY_OTHERS:
            raise PermissionError("another user may write to it")
        digest, _, body = opened.read().partition(b"\n")
    if digest != _digest(key, body):
        raise ValueError("it is damaged")
    return json.loads(body)


def _digest(key: str, body: bytes) -> bytes:
    return hashlib.sha256(key.encode() + body).hexdigest().encode()


@contextmanager
def work_folder(parent: Path, prefix: str) -> Iterator[Path]:
    """A new folder in ``parent``, removed at the end. Folders left by killed processes are removed
    first; their locks are free."""
    parent.mkdir(parents=True, exist_ok=True)
    for left in parent.glob(prefix + "*"):
        if _is_abandoned(left):
            shutil.rmtree(left, ignore_errors=True)
    folder = Path(tempfile.mkdtemp(prefix=prefix, dir=parent))
    try:
        with (folder / _LOCK).open("wb") as lock:
            if fcntl is not None:
                fcntl.flock(lock, fcntl.LOCK_EX)
            yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _is_abandoned(folder: Path) -> bool:
    if fcntl is not None:
        with suppress(OSError), (folder / _LOCK).open("rb+") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        if (folder / _LOCK).exists():
            return False
    # The folder has no lock file: it was just created, or an older version created it.
    with suppress(OSError):
        return time.time() - folder.stat().st_mtime > _ABANDONED_S
    return False
