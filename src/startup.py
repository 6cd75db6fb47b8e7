"""Python's garbage collector, which a start does better without."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def collector_paused() -> Iterator[None]:
    """No search for garbage in this block, which is to make many objects that stay: the more there
    are, the longer each search takes, and it finds nothing. A seventh of the time of our imports.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
