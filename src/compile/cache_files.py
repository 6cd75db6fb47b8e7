"""Where pagespec keeps what it would otherwise compute at every start, and how it writes there."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path


def cache_root(cache_dir: str | os.PathLike[str] | None = None) -> Path:
    """``cache_dir``, else ``$PAGESPEC_CACHE``, else ``~/.cache/pagespec``."""
    chosen = cache_dir or os.environ.get("PAGESPEC_CACHE") or Path.home() / ".cache" / "pagespec"
    return Path(chosen)


def write_whole(file: Path, content: bytes) -> None:
    """Write ``file``, and its folder if there is none. It appears whole, by one rename, and only
    this user may read or write it.

    Raises:
        OSError: the disk is full, or the folder may not be written to.
    """
    file.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(dir=file.parent, delete=False) as work:
        work.write(content)
    Path(work.name).replace(file)
