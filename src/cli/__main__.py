"""The ``pagespec`` script, and ``python -m pagespec.cli``."""

import gc

from ..startup import gc_paused

with gc_paused():
    from .main import main

    gc.freeze()  # exclude the modules' long-lived objects from collections

__all__ = ["main"]

if __name__ == "__main__":
    main()
