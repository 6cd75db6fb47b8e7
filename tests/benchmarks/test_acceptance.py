"""The table of draft tokens on a CPU."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks import acceptance
from pagespec.engine.drafting.costs import DEFAULT_COSTS


class FakeLLM:
    """Answers with four tokens; a step computes one token, with draft tokens two."""

    def __init__(self, spoilt: str = "") -> None:
        self.engine = SimpleNamespace(scheduler=SimpleNamespace(num_steps=0, drafter=None))
        self._spoilt = spoilt

    def chat(self, messages: list[Any], params: list[Any], *, use_tqdm: bool) -> list[Any]:
        assert len(messages) == len(params)
        assert not use_tqdm
        scheduler = self.engine.scheduler
        drafter = scheduler.drafter
        scheduler.num_steps += 4 if drafter is None else 2
        if drafter is not None:
            scheduler.draft_counts.add(4, 2)
        last = 5 if type(drafter).__name__ == self._spoilt else 4
        return [
            SimpleNamespace(outputs=[SimpleNamespace(token_ids=[1, 2, 3, last])]) for _ in messages
        ]


@pytest.mark.parametrize(("num_requests", "spoilt"), [(1, ""), (4, ""), (4, "SuffixDrafter")])
def test_a_line_has_acceptance_and_speed(
    num_requests: int, spoilt: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = FakeLLM(spoilt)
    # CPU time follows the steps.
    monkeypatch.setattr(
        acceptance.time, "process_time", lambda: float(llm.engine.scheduler.num_steps)
    )
    prompts = acceptance.KINDS["edit"]
    cell = acceptance._cell(llm, DEFAULT_COSTS, prompts, num_requests, 0.8, 4, 3)
    for method in acceptance.METHODS:
        assert cell[method] == {"x": 2.0, "tokens_per_step": 2.0, "accepted": 0.5}
    assert cell["num_different"] == bool(spoilt)
    shown = acceptance.line({"requests": num_requests, "kind": "edit", "temperature": 0.8, **cell})
    assert shown.split()[3:] == [
        *("1.0" if num_requests == 1 else "4.0", "0.0%"),
        *("50%", "2.00", "2.00") * 2,
    ]


def test_each_kind_has_four_prompts() -> None:
    assert all(len(set(prompts)) == 4 for prompts in acceptance.KINDS.values())
