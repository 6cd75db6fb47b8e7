"""A start that has run a few sizes of batches has every form of the decode kernel."""

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
OTHERS = (1, 3, 8, 15, 16, 17, 32, 48, 63, 65, 127, 128, 256, 300)
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
