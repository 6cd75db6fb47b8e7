"""Which of the programs that share a task comes last, so that it can finish the task.

Programs of one launch cannot wait for one another: they may not all be on the machine at once. But
the last one to arrive finds what all the others stored, so that what was a second launch can be
done by it.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def arrives_last(counter, expected):  # type: ignore[no-untyped-def]
    """Whether this program is the last of ``expected`` to call this; the counter is 0 again then.

    What the others stored before can be loaded from L2 after it (``cache_modifier=".cg"``): the
    barrier puts the stores of all threads before the one atomic, which releases them to the whole
    card and acquires those of the others.

    Args:
        counter: pointer to an int32, 0 before the first of them arrives.
    """
    tl.debug_barrier()
    is_last = tl.atomic_add(counter, 1, sem="acq_rel", scope="gpu") == expected - 1
    tl.debug_barrier()
    if is_last:
        tl.store(counter, 0)
    return is_last
