"""Makes Triton 3.7's interpreter as 3.9's is, where they differ and a GPU is as the latter."""

from __future__ import annotations

from typing import Any

import numpy as np
import triton.language as tl
from triton.runtime.interpreter import InterpreterBuilder


def mend() -> None:
    """A maximum or minimum of NaN and a number is the number, and there are bfloat16 constants."""
    builder: Any = InterpreterBuilder
    builder.create_maxnumf = lambda self, a, b: self.binary_op(a, b, np.fmax)
    builder.create_minnumf = lambda self, a, b: self.binary_op(a, b, np.fmin)
    if not hasattr(builder, "get_bf16"):
        builder.get_bf16 = lambda self, x: self.create_fp_trunc(self.get_fp32(x), tl.bfloat16)
