"""Log-probabilities in answers: the engine's own floats, in every form."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from pagespec import LLM
from pagespec.engine.outputs import Logprob
from pagespec.server.logprobs import CompletionLogprobs, chat_logprobs
from tests.support.chat_models import save_chat_model
from tests.support.server import serving

PROMPT = [5, 40, 41, 90, 7, 12]


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> LLM:
    folder = save_chat_model(tmp_path_factory.mktemp("model"))
    return LLM(folder, max_num_seqs=8, num_blocks=200)


@pytest.fixture(scope="module")
def http(llm: LLM) -> Iterator[httpx.Client]:
    with serving(llm) as url, httpx.Client(base_url=url, timeout=60) as http:
        yield http


def post(http: httpx.Client, path: str, **body: Any) -> dict[str, Any]:
    answer = http.post(path, json=body)
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


def test_an_echoed_prompt_is_scored(http: httpx.Client, llm: LLM) -> None:
    """As lm-eval asks for it: one token more is generated, and left out of the sum."""
    asked = {"prompt": [PROMPT], "temperature": 0, "max_tokens": 1, "logprobs": 1, "echo": True}
    logprobs = post(http, "/v1/completions", **asked, seed=1234)["choices"][0]["logprobs"]
    (score,) = llm.score([PROMPT], use_tqdm=False)
    assert logprobs["token_logprobs"][:-1] == score.logprobs
    assert logprobs["top_logprobs"][0] is None
    pairs = zip(logprobs["token_logprobs"], logprobs["top_logprobs"], score.ranks, strict=False)
    for own, top, rank in list(pairs)[1:]:
        assert (own == max(top.values())) == (rank == 1)
    # The generated token is the greedy choice.
    assert logprobs["token_logprobs"][-1] == max(logprobs["top_logprobs"][-1].values())
    alone = post(http, "/v1/completions", **{**asked, "max_tokens": 0})["choices"][0]["logprobs"]
    assert alone == {name: found[:-1] for name, found in logprobs.items()}


def test_all_endpoints_give_the_same_floats(http: httpx.Client) -> None:
    asked = {"temperature": 0, "max_tokens": 6}
    as_text = post(http, "/v1/completions", prompt=PROMPT, logprobs=2, return_token_ids=True,
                   **asked)["choices"][0]  # fmt: skip
    params = {**asked, "logprobs": 2}
    as_ids = post(http, "/inference/v1/generate", token_ids=PROMPT, sampling_params=params)
    content = as_ids["choices"][0]["logprobs"]["content"]
    assert [entry["logprob"] for entry in content] == as_text["logprobs"]["token_logprobs"]
    assert [entry["token_id"] for entry in content] == as_text["token_ids"]
    assert all(entry["rank"] == 1 and len(entry["top_logprobs"]) == 2 for entry in content)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": PROMPT, "prompt_logprobs": 1}),
        ("/v1/chat/completions",
         {"messages": [{"role": "user", "content": "ab"}], "prompt_logprobs": 1, "max_tokens": 2,
          "return_token_ids": True}),
        ("/inference/v1/generate",
         {"token_ids": PROMPT, "sampling_params": {"prompt_logprobs": 1, "max_tokens": 2},
          "return_token_ids": True}),
    ],
)  # fmt: skip
def test_prompt_logprobs_are_by_token_id(
    http: httpx.Client, llm: LLM, path: str, body: dict[str, Any]
) -> None:
    answer = post(http, path, **body)
    entries = answer.get("prompt_logprobs") or answer["choices"][0]["prompt_logprobs"]
    prompt = answer.get("prompt_token_ids", PROMPT)
    (score,) = llm.score([prompt], use_tqdm=False)
    assert entries[0] is None
    own = [entry[str(token)] for token, entry in zip(prompt[1:], entries[1:], strict=True)]
    assert [entry["logprob"] for entry in own] == score.logprobs[1:]
    assert [entry["rank"] for entry in own] == score.ranks[1:]


def test_the_best_of_several(http: httpx.Client) -> None:
    """The likeliest first; all that were computed are counted."""
    asked = {"prompt": PROMPT, "seed": 5, "max_tokens": 5, "logprobs": 0, "ignore_eos": True}
    all_of_them = post(http, "/v1/completions", **asked, n=6)["choices"]
    best = post(http, "/v1/completions", **asked, n=2, best_of=6)
    sums = sorted((sum(c["logprobs"]["token_logprobs"]) for c in all_of_them), reverse=True)
    assert [sum(c["logprobs"]["token_logprobs"]) for c in best["choices"]] == sums[:2]
    assert best["usage"]["completion_tokens"] == 30


def test_greedy_means_the_largest_of_the_top() -> None:
    """Also where another token has the same text: U+FFFD is that of many."""
    found = {7: Logprob(-0.5, 1), 8: Logprob(-0.7, 2), 9: Logprob(-3.0, 3)}
    texts = {7: "\ufffd", 8: "\ufffd", 9: "z"}
    read = CompletionLogprobs(3, texts.__getitem__).read([7, 9], [found, found])
    assert read["top_logprobs"] == [{"\ufffd": -0.5, "z": -3.0}] * 2
    assert read["token_logprobs"] == [-0.5, -3.0]
    assert read["text_offset"] == [0, 1]


def test_numbers_that_json_lacks() -> None:
    found = {1: Logprob(-math.inf, 2), 0: Logprob(math.nan, 1)}
    (entry,) = chat_logprobs([1], [found], 1, str)
    assert entry["logprob"] == -9999.0
    assert entry["top_logprobs"][0]["logprob"] is None
