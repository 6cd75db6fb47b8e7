"""The check that a benchmark's machine has GPUs, before the benchmark imports torch.

Every script of this folder starts with it, except those that measure on a CPU
(``tests/benchmarks/test_gpu.py`` lists them).
"""

from __future__ import annotations

import ctypes
import sys
from itertools import pairwise

_NO_GPU = ("--help", "-h", "--dry")
_MODELS = ("tiny", "embedded")


def num_gpus() -> int:
    """CUDA devices that this process can use; 0 without a driver."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return 0
    count = ctypes.c_int()
    is_counted = driver.cuInit(0) == 0 and driver.cuDeviceGetCount(ctypes.byref(count)) == 0
    return count.value if is_counted else 0


def require_gpu(*unless: str, number: int = 1, hint: str = "") -> None:
    """End this script with exit code 2 and one line if the machine has too few GPUs.

    Args:
        unless: words of the command line of a run without a GPU, beside ``--help``, ``--dry`` and a
            tiny model.
        number: of GPUs.
        hint: a way to run without one, for the line.
    """
    words = [word for argument in sys.argv[1:] for word in argument.split("=", 1)]
    models = [model for name, model in pairwise(words) if name == "--model"]
    if set(words).intersection((*_NO_GPU, *unless)) or set(models).intersection(_MODELS):
        return
    found = num_gpus()
    if found < number:
        needed = "a GPU" if number == 1 else f"{number} GPUs"
        print(
            f"needs {needed}: {found or 'no'} CUDA device{'s' * (found != 1)} found here{hint}",
            file=sys.stderr,
        )
        sys.exit(2)
