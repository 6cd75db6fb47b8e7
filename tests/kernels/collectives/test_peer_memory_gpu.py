"""The collectives on several GPUs: the bits of every form of call, alone and in CUDA graphs."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.support.apart import run_apart

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
]


def test_all_gpus_have_the_bits_of_the_sum_in_rank_order_and_of_the_norm() -> None:
    script = Path(__file__).with_name("all_gpus.py")
    assert run_apart(str(script)).endswith("ok\n")
