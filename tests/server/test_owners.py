"""Shares per client: a client that floods the server does not delay another's first token."""

from __future__ import annotations

import json
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import httpx
import pytest

from tests.support.content_llm import content_llm, slow_llm
from tests.support.server import serving

COMPLETIONS = "/v1/completions"
NUM_FLOOD = 40
_FLOOD = {"prompt": "abc", "max_tokens": 24, "ignore_eos": True}


def _wait_for_first_token(url: str, body: dict[str, Any], headers: dict[str, str]) -> None:
    request = {"prompt": "ab", "max_tokens": 2, "ignore_eos": True, "stream": True, **body}
    with httpx.stream("POST", url + COMPLETIONS, json=request, headers=headers, timeout=60) as got:
        for line in got.iter_lines():
            if line.startswith("data: ") and json.loads(line[6:]).get("choices"):
                return
    raise AssertionError("no token came")


def _sent_by(client: dict[str, str]) -> tuple[dict[str, str], dict[str, str]]:
    """(fields, headers) of the client's requests."""
    headers = {"Authorization": f"Bearer {client['key']}"} if "key" in client else {}
    return {"user": client["user"]} if "user" in client else {}, headers


def _num_served_before(
    flooder: dict[str, str], other: dict[str, str], *, policy: str = "fair", **config: Any
) -> int:
    """How many of 40 requests of ``flooder``, on 4 places, were answered before ``other``, which
    came after them, had its first token."""
    llm = slow_llm(0.01, policy=policy, max_num_seqs=4, num_blocks=200)
    with serving(llm, **config) as url, ThreadPoolExecutor(NUM_FLOOD) as pool:
        fields, headers = _sent_by(flooder)
        post = partial(httpx.post, url + COMPLETIONS, headers=headers, timeout=60)
        sent = [pool.submit(post, json=_FLOOD | fields) for _ in range(NUM_FLOOD)]
        while len(llm.engine.scheduler.requests) + sum(one.done() for one in sent) < NUM_FLOOD:
            time.sleep(0.005)
        num_done = sum(one.done() for one in sent)
        fields, headers = _sent_by(other)
        _wait_for_first_token(url, fields, headers)
        num_served = sum(one.done() for one in sent) - num_done
        for one in sent:
            one.result().raise_for_status()
    assert num_done < NUM_FLOOD // 3, "the flood was over"
    return num_served


_CLIENTS = {
    "keys": ({"key": "one"}, {"key": "two"}, {"api_keys": ("one", "two")}),
    "users": ({"user": "one"}, {"user": "two"}, {}),
    "users of one key": (
        {"key": "k", "user": "one"},
        {"key": "k", "user": "two"},
        {"api_keys": ("k",)},
    ),
}


@pytest.mark.parametrize("clients", _CLIENTS)
def test_a_flood_does_not_keep_another_client_waiting(clients: str) -> None:
    flooder, other, config = _CLIENTS[clients]
    assert _num_served_before(flooder, other, **config) <= 8


def test_under_fcfs_it_does() -> None:
    assert _num_served_before({"user": "one"}, {"user": "two"}, policy="fcfs") > 16


def test_the_same_client_waits_behind_its_own_flood() -> None:
    assert _num_served_before({"user": "one"}, {"user": "one"}) > 16


def test_a_user_of_a_key_has_no_share_beside_it_where_there_are_several_keys() -> None:
    clients = {"key": "one", "user": "a"}, {"key": "one", "user": "b"}
    assert _num_served_before(*clients, api_keys=("one", "two")) > 16


def test_neither_keys_nor_users_are_kept_or_traced(tmp_path) -> None:
    trace = tmp_path / "trace.jsonl"
    llm = content_llm(policy="fair", trace=str(trace))
    owners = []
    add = llm.engine.add

    def watched(request: Any, *arguments: Any) -> None:
        owners.append(request.owner)
        add(request, *arguments)

    llm.engine.add = watched  # type: ignore[method-assign]
    with serving(llm, api_keys=("sesame", "street")) as url:
        for key in ("sesame", "street", "sesame"):
            headers = {"Authorization": f"Bearer {key}"}
            body = {"prompt": "abc", "max_tokens": 2, "user": "somebody"}
            httpx.post(url + COMPLETIONS, json=body, headers=headers).raise_for_status()
    adds = [e for e in map(json.loads, trace.read_text().splitlines()) if e["event"] == "add"]
    assert [event["owner"] for event in adds] == [0, 1, 0]
    assert owners[0] == owners[2] != owners[1]
    seen = trace.read_text() + "".join(owners)
    assert not any(word in seen for word in ("sesame", "street", "somebody"))


@pytest.mark.parametrize("owner", [1, None, b"x", "\ud800"])
def test_an_owner_offline_is_text(owner: object) -> None:
    from pagespec import InvalidInputError

    llm = content_llm(policy="fair")
    with pytest.raises(InvalidInputError) as caught:
        llm.generate({"prompt": "abc", "owner": owner}, use_tqdm=False)
    assert caught.value.field.endswith(".owner")
