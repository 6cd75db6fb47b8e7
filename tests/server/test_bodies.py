"""Large bodies are parsed like small ones and block no other request."""

from __future__ import annotations

import json
import random
import threading
import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from pagespec import AsyncLLM
from pagespec.server.bodies import MAX_INLINE_BYTES, MAX_NUM_CONTAINERS, parse
from pagespec.server.errors import ApiError
from tests.support.scripted_llm import scripted_llm
from tests.support.server import serving

JSON = {"Content-Type": "application/json"}
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
OWN = ("id", "created", "request_id", "usage")
PAD = MAX_INLINE_BYTES + 1


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    llm = scripted_llm("qwen3", ["Plain words."], max_num_seqs=4)
    with serving(AsyncLLM(llm, max_num_requests=64)) as url:
        yield url


def random_value(rng: random.Random, depth: int = 0) -> Any:
    kind = rng.randrange(9 if depth < 4 else 5)
    if kind == 0:
        return rng.choice([0, -1, 10**30, 12345, 0.5, -1e300, True, False, None])
    if kind < 3:
        return "".join(rng.choice('a"\\\n\u2028é語\U0001f600 [],{}:') for _ in range(9))
    if kind < 5:
        return [rng.randrange(-99, 99999) for _ in range(rng.choice([0, 1, 3000]))]
    if kind < 7:
        return [random_value(rng, depth + 1) for _ in range(rng.randrange(6))]
    return {str(rng.random()): random_value(rng, depth + 1) for _ in range(rng.randrange(6))}


@pytest.mark.parametrize("seed", range(30))
def test_it_is_parsed_as_the_standard_library_does(seed: int) -> None:
    rng = random.Random(seed)
    value = [random_value(rng) for _ in range(30)]
    for text in (
        json.dumps(value),
        json.dumps(value, indent=rng.choice([None, 1]), ensure_ascii=False),
        json.dumps(value, separators=(" ,", " : ")),
    ):
        assert parse(text.encode()) == value
        # One wrong byte: the same error at the same place, or the same value.
        place = rng.randrange(len(text))
        wrong = text[:place] + rng.choice(',]}["x0-') + text[place + 1 :]
        assert outcome(parse, wrong.encode()) == outcome(json.loads, wrong.encode())


def outcome(read: Any, body: bytes) -> Any:
    try:
        return read(body)
    except json.JSONDecodeError as error:
        return error.msg, error.pos
    except ValueError as error:
        return type(error)


NUMBERS = ",".join(["1234"] * 2000)


@pytest.mark.parametrize(
    "text",
    [f"[{NUMBERS}]", f"[{NUMBERS},]", f"[{NUMBERS}, ]", f"[,{NUMBERS}]", f"[{NUMBERS},,1]",
     f"[{NUMBERS},01]", f"[{NUMBERS}, 1.5, 2]", f"[{NUMBERS} 1]", f"[{NUMBERS}", f"[{NUMBERS}e3]",
     f"[{NUMBERS},-]", "[" + " " * 600 + ",1]", f"[{NUMBERS},[]]",
     f"[ {NUMBERS.replace(',', ' , ')} ]", f"[{'1' * 3000}]",
     f"[{NUMBERS},{'1' * 5000}]", "[" + " " * 3000 + "]", "[" + " " * 3000 + "1]", "\ufeff[1]"],
    ids=lambda text: f"{text[:4]}..{text[-9:]}",
)  # fmt: skip
def test_runs_of_numbers(text: str) -> None:
    assert outcome(parse, text.encode()) == outcome(json.loads, text.encode())


def test_containers_are_counted() -> None:
    assert len(parse(b"[" + b",".join([b"[]"] * (MAX_NUM_CONTAINERS - 1)) + b"]"))
    with pytest.raises(ApiError, match=str(MAX_NUM_CONTAINERS)):
        parse(b"[" + b",".join([b"{}"] * MAX_NUM_CONTAINERS) + b"]")


ANSWERED: list[tuple[str, dict[str, Any]]] = [
    (COMPLETIONS, {"prompt": "ab", "max_tokens": 1}),
    (COMPLETIONS, {"prompt": [5, 6], "max_tokens": 1}),
    (COMPLETIONS, {"prompt": [[5], [6]], "max_tokens": 1}),
    (CHAT, {"messages": [{"role": "user", "content": "a"}], "max_tokens": 1}),
    ("/inference/v1/generate", {"token_ids": [5], "sampling_params": {"max_tokens": 1}}),
    ("/tokenize", {"prompt": "a"}),
    ("/detokenize", {"tokens": [70, 70]}),
]
REFUSED: list[tuple[str, bytes]] = [
    (COMPLETIONS, b'{"prompt": 5}'),
    (COMPLETIONS, b'{"prompt": "a", "frobnicate": 1}'),
    (COMPLETIONS, b'{"prompt": "a"'),
    (COMPLETIONS, b'{"prompt": "\xff"}'),
    (COMPLETIONS, b'["prompt"]'),
    (COMPLETIONS, b'"prompt"'),
    (COMPLETIONS, b'{"prompt": "a", "seed": ' + b"1" * 5000 + b"}"),
    (COMPLETIONS, b'{"prompt": ["a", 5]}'),
    (COMPLETIONS, b'{"prompt": "a", "temperature": "hot"}'),
    (CHAT, b'{"messages": [5]}'),
    (CHAT, b'{"messages": [{"role": "user", "content": "a"}], "response_format": {"type": 1}}'),
    ("/detokenize", b'{"tokens": [1, true]}'),
    ("/tokenize", b'{"messages": []}'),
    (CHAT, b"null"),
]


@pytest.mark.parametrize(("path", "body"), ANSWERED, ids=str)
def test_a_large_body_is_answered_as_a_small_one(url: str, path: str, body: dict[str, Any]) -> None:
    answers = []
    for padding in (0, PAD, 1 << 20):
        content = json.dumps(body).encode() + b" " * padding
        answer = httpx.post(f"{url}{path}", content=content, headers=JSON, timeout=60)
        assert answer.status_code == 200, answer.text
        found = answer.json()
        answers.append({k: v for k, v in found.items() if k not in OWN})
    assert answers[0] == answers[1] == answers[2]


@pytest.mark.parametrize(("path", "body"), REFUSED, ids=str)
def test_a_large_body_is_refused_as_a_small_one(url: str, path: str, body: bytes) -> None:
    answers = []
    for padding in (0, PAD):
        content = body + b" " * padding
        answer = httpx.post(f"{url}{path}", content=content, headers=JSON, timeout=60)
        answers.append((answer.status_code, answer.json()))
    if body.endswith(b'"a"'):  # an object that does not end: at another character
        message = answers[0][1]["error"]["message"].rpartition(" ")[0]
        assert answers[1][1]["error"]["message"].rpartition(" ")[0] == message
    else:
        assert answers[0] == answers[1]
    assert answers[0][0] == 400


N = 11_000_000
HUGE = {
    "numbers": b'{"prompt":[' + b",".join([b"1"] * (N // 2)) + b"]}",
    "texts": b'{"prompt":[' + b",".join([b'"a"'] * (N // 4)) + b"]}",
    "lists": b'{"prompt":[' + b",".join([b"[1]"] * (N // 4)) + b"]}",
    "objects": b'{"messages":[' + b",".join([b"{}"] * (N // 3)) + b"]}",
    "unknown": b'{"prompt":"a","x":[' + b",".join([b"[]"] * (N // 3)) + b"]}",
    "fields": b"{" + b",".join(b'"%d":1' % i for i in range(N // 11)) + b"}",
    "stops": b'{"prompt":"a","stop_token_ids":[' + b",".join([b"1"] * (N // 2)) + b"]}",
}


@pytest.mark.parametrize("kind", HUGE)
def test_the_loop_goes_on_meanwhile(url: str, kind: str) -> None:
    path = CHAT if kind == "objects" else COMPLETIONS
    answers: list[httpx.Response] = []

    def post() -> None:
        answers.append(httpx.post(f"{url}{path}", content=HUGE[kind], headers=JSON, timeout=300))

    thread = threading.Thread(target=post)
    thread.start()
    waits = []
    with httpx.Client(base_url=url, timeout=300) as http:
        while thread.is_alive():
            began = time.monotonic()
            assert http.get("/health").status_code == 200
            waits.append(time.monotonic() - began)
            time.sleep(0.01)
    thread.join()
    print(f"/health took {max(waits):.3f} s at most while {kind} were read")
    assert answers[0].status_code == 400, answers[0].text[:200]
    assert max(waits) < 1.5
