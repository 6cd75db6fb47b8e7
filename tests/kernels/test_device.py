"""The compilation counters on which tests rely to show that nothing was compiled."""

from __future__ import annotations

import importlib.util

import pytest

from tests.support.apart import run_apart

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="triton is not installed"
)

PROGRAM = """
from pagespec.kernels.device import count_triton_variants
from pagespec.kernels.attention import decode
from pagespec.kernels.arch import is_gluon_known

kernels = [decode.decode_kernel]
if is_gluon_known():
    from pagespec.kernels.attention import prefill_sm90
    from pagespec.kernels.matmul.sm90 import matmul_sm90
    kernels += [matmul_sm90.skinny_kernel, prefill_sm90.prefill_kernel]
counts = [count_triton_variants()]
for device, kernel in enumerate(kernels):
    kernel.device_caches[device] = ({"a form": object(), "another": object()},)
    counts.append(count_triton_variants())
assert counts == [2 * i for i in range(len(kernels) + 1)], counts
"""


def test_all_kernels_are_counted() -> None:
    """In a process without Triton's interpreter, which compiles nothing."""
    run_apart("-c", PROGRAM)
