"""The device function with which a kernel overlaps the preceding one
(:func:`.device.overlap_options`)."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def overlap(PDL: tl.constexpr, LATE_TRIGGER: tl.constexpr = False):  # type: ignore[no-untyped-def]
    """With PDL, let the next kernel start, and wait until the results of the preceding kernels can
    be read.

    LATE_TRIGGER: wait first, then let the next kernel start
        (:func:`.device.triggers_dependents_late`).
    """
    if PDL:
        if not LATE_TRIGGER:
            tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
        if LATE_TRIGGER:
            tl.extra.cuda.gdc_launch_dependents()
