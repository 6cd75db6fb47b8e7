"""How one line of an input file is parsed."""

from __future__ import annotations

import contextlib
import json
import math
import time

import pytest

from pagespec.cli.jsonl import Line, parse_question
from pagespec.errors import InvalidInputError


@pytest.mark.parametrize("field", ["at the top", "messages"])
def test_a_line_takes_time_as_it_has_names(field: str) -> None:
    def seconds(num_names: int) -> float:
        content = {f"f{i}": i for i in range(num_names)}
        whole = {"messages": [content]} if field == "messages" else content
        line = Line(0, json.dumps(whole).encode())
        best = math.inf
        for _ in range(5):
            began = time.process_time()
            with contextlib.suppress(InvalidInputError):
                parse_question(line)
            best = min(best, time.process_time() - began)
        return best

    assert seconds(16_000) < 80 * seconds(1_000), "16 times the names; their square is 256 times"
