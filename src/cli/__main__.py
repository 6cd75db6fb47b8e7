"""The ``pagespec`` script, and ``python -m pagespec.cli``."""

import gc

from ..startup import gc_paused

with gc_paused():
    from .main import main

    gc.freeze()  # objects of modules stay: no collection scans them

__all__ = ["main"]

if __name__ == "__main__":
    main()
