"""The sweep of attention's parameters: which of its variants may have other bits."""

from __future__ import annotations

import argparse
from dataclasses import replace

import pytest

pytest.importorskip("triton")
from benchmarks import attention_sweep
from benchmarks.attention_sweep import DECODE, PREFILL, Sweep
from pagespec.kernels.attention.tiling import Tiling


def order_of(tiling: Tiling) -> tuple[int, ...]:
    """What the bits hang on."""
    return tiling.block_n, tiling.near_split, tiling.far_split, tiling.split_change


@pytest.mark.parametrize("fp8", [False, True])
def test_only_variants_that_say_so_change_the_order_of_summation(fp8: bool) -> None:
    options = argparse.Namespace(
        dry=False, repeats=1, block_size=16, seconds=1.0, only=["x"], fp8=fp8
    )
    sweep = Sweep(options)
    assert sweep.cases == [replace(case, is_fp8=fp8) for case in [*DECODE, *PREFILL]]
    for case in sweep.cases:
        variants = sweep.variants_of(case)
        present = variants.pop("present")
        assert bool(variants) != case.is_prefill
        for name, tiling in variants.items():
            assert tiling != present, name
            is_same = order_of(tiling) == order_of(present)
            assert is_same != (name in attention_sweep._OTHER_BITS), name
