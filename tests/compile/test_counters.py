"""What tests rely on when they say that nothing was compiled."""

from __future__ import annotations

import importlib.util

import pytest

from tests.kernels.apart import run_apart

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="triton is not installed"
)

PROGRAM = """
from pagespec.compile.counters import count_triton_variants
from pagespec.kernels import triton_decode
from pagespec.kernels.linear_tiles import is_gluon_known

kernels = [triton_decode.decode_kernel]
if is_gluon_known():
    from pagespec.kernels import gluon_linear, gluon_norm_linear, gluon_prefill
    kernels += [gluon_linear.early_kernel, gluon_norm_linear.normed_kernel]
    kernels += [gluon_prefill.prefill_kernel]
counts = [count_triton_variants()]
for device, kernel in enumerate(kernels):
    kernel.device_caches[device] = ({"a form": object(), "another": object()},)
    counts.append(count_triton_variants())
assert counts == [2 * i for i in range(len(kernels) + 1)], counts
"""


def test_all_kernels_are_counted() -> None:
    """In a process without Triton's interpreter, which compiles nothing."""
    run_apart("-c", PROGRAM)
