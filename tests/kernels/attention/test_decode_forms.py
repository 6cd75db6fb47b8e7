"""A start that has run a few batch sizes has built every variant of the decode kernel."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest

from tests.support.apart import run_apart

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="triton is not installed"
)

# Rows of 8 KV heads: one for each way to spread pieces over programs.
WARM = (2, 33, 64, 257)
OTHERS = (1, 8, 15, 17, 32, 63, 65, 128, 300)
CONTEXTS = (5, 240, 900, 5000)


def test_no_batch_has_a_form_of_its_own() -> None:
    batches = [
        (is_turned, num_rows, context)
        for is_turned in (False, True)
        for num_rows in (*WARM, *OTHERS)
        for context in (CONTEXTS if num_rows in OTHERS and num_rows < 20 else CONTEXTS[:1])
    ]
    program = Path(__file__).with_name("decode_forms.py")
    printed = run_apart(str(program), json.dumps(batches))
    asked = dict(zip(batches, json.loads(printed.splitlines()[-1]), strict=True))
    for is_turned in (False, True):
        warm = [asked[is_turned, num_rows, CONTEXTS[0]] for num_rows in WARM]
        assert [len(forms) for forms in warm] == [1] * len(WARM)
        known = {form for forms in warm for form in forms}
        assert len(known) == len(WARM)
        for batch, forms in asked.items():
            if batch[0] is is_turned:
                assert set(forms) <= known, batch


def test_numbers_of_programs_follow_the_multiprocessors() -> None:
    import torch

    from pagespec.kernels.attention.tiling import choose_spread, choose_tiling, for_card

    tuned = choose_tiling(torch.bfloat16, 128, 128)
    assert for_card(tuned, 132) is tuned
    half = for_card(tuned, 66)
    order = ("block_n", "near_split", "far_split", "split_change")  # what the bits hang on
    assert all(getattr(half, name) == getattr(tuned, name) for name in order)
    assert (half.unsplit_from, half.few_programs) == (512, 68)
    # Half the programs on half a card are spread alike, up to the workers that all cards have.
    for num_programs in (16, 40, 64, 300, 512, 700, 1024, 3000):
        whole = choose_spread(tuned, num_programs, 8192, 0)
        assert choose_spread(half, num_programs // 2, 8192, 0).first_splits == whole.first_splits
