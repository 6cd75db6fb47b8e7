"""Constraints that compile slowly block no chat, and large choices behave like enums."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest

from pagespec import LLM, AsyncLLM
from pagespec.structured.grammars import Grammars
from tests.support.chat_models import save_chat_model
from tests.support.server import serving

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
QUICK_S = 20.0
NUM_SLOW = 12


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_chat_model(tmp_path_factory.mktemp("model"))


@pytest.fixture
def url(model: str) -> Iterator[str]:
    with serving(AsyncLLM(LLM(model, compile="eager", max_num_seqs=8, num_blocks=400))) as url:
        yield url


def chat(**more: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": "a"}], "max_tokens": 2, **more}


@pytest.mark.parametrize("size", [pytest.param(10, marks=pytest.mark.nightly), 6000])
def test_slow_ones_hold_up_no_chat(url: str, hold: Callable[..., Any], size: int) -> None:
    held = hold(Grammars, "_compile", lambda _, constraint: "slow" in constraint.text)
    statuses: list[int] = []

    def post(number: int) -> None:
        names = {f"slow{number}{'x' * size}": {"type": "null"}}
        body = {"prompt": "a", "max_tokens": 2, "guided_json": {"properties": names}}
        statuses.append(httpx.post(f"{url}{COMPLETIONS}", json=body, timeout=60).status_code)

    known = chat(response_format={"type": "json_object"})
    assert httpx.post(f"{url}{CHAT}", json=known, timeout=60).status_code == 200
    threads = [threading.Thread(target=post, args=(number,)) for number in range(NUM_SLOW)]
    for thread in threads:
        thread.start()
    assert held.has_begun.wait(30)
    time.sleep(0.3)  # the others wait behind it
    try:
        for _ in range(3):
            asked = [chat(), known]
            if size > 4096:  # small ones do not wait for large ones
                asked.append(chat(guided_regex="[ab]"))
            for body in asked:
                answer = httpx.post(f"{url}{CHAT}", json=body, timeout=QUICK_S)
                assert answer.status_code == 200, body
        assert 200 not in statuses, "they were not held"
    finally:
        held.goes_on.set()
    for thread in threads:
        thread.join()
    assert set(statuses) <= {200, 429}
    assert statuses.count(200) >= 2


@pytest.mark.parametrize("num_choices", [1999, 2001, 15_000])
@pytest.mark.parametrize("stream", [False, True])
def test_many_choices(url: str, num_choices: int, stream: bool) -> None:
    choices = [f"item {number}" for number in range(num_choices)]
    body = {"prompt": "a", "guided_choice": choices, "max_tokens": 64, "temperature": 1, "seed": 3}
    answer = httpx.post(f"{url}{COMPLETIONS}", json={**body, "stream": stream}, timeout=60)
    assert answer.status_code == 200, answer.text
    if stream:
        events = [e.removeprefix("data: ") for e in answer.text.split("\n\n")[:-2]]
        assert all("error" not in json.loads(event) for event in events), events[-1]
        text = "".join(json.loads(event)["choices"][0]["text"] for event in events)
    else:
        text = answer.json()["choices"][0]["text"]
    assert text in choices


TOO_MANY = {
    "grammar": {"guided_grammar": "start: " + " | ".join(f'"i{n}"' for n in range(12_000))},
    "schema": {"guided_json": {"anyOf": [
        {"type": "object", "properties": {f"p{n}": {"const": n}}, "required": [f"p{n}"],
                "additionalProperties": False}
        for n in range(2_100)]}},
}  # fmt: skip


@pytest.mark.parametrize("kind", TOO_MANY)
@pytest.mark.parametrize("stream", [False, True])
def test_what_cannot_be_kept_is_refused_at_the_door(url: str, kind: str, stream: bool) -> None:
    """A constraint is either rejected at once or kept to the end: no stream ends early because of
    it."""
    body = {"prompt": "a", "max_tokens": 40, "stream": stream, **TOO_MANY[kind]}
    answer = httpx.post(f"{url}{COMPLETIONS}", json=body, timeout=60)
    if kind == "grammar":
        assert answer.status_code == 400
        assert answer.json()["error"]["param"] == "guided_grammar"
        assert "too complex" in answer.json()["error"]["message"]
    else:
        assert answer.status_code == 200, answer.text[:300]
        assert '"error"' not in answer.text
