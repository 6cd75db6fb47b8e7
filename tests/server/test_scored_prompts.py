"""A prompt that is only scored or echoed needs no room for an output: it may fill the context."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from pagespec import LLM, InvalidInputError, SamplingParams
from spec import replay
from tests.support.chat_models import save_chat_model
from tests.support.server import serving

COMPLETIONS = "/v1/completions"
ECHO = {"echo": True, "max_tokens": 0}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_chat_model(tmp_path_factory.mktemp("model"))


def make(folder: str, max_model_len: int, **settings: Any) -> LLM:
    settings = {"max_num_seqs": 4, "num_blocks": 60, "compile": "eager"} | settings
    return LLM(folder, max_model_len=max_model_len, check_invariants=True, **settings)


@pytest.fixture(scope="module")
def roomy(folder: str) -> Iterator[LLM]:
    return make(folder, 200, compile="graph")


def prompt_of(num_tokens: int) -> list[int]:
    return [(7 * i) % 200 + 3 for i in range(num_tokens)]


# A whole number of blocks of 16, one more, one less; and chunks of the prompt.
@pytest.mark.parametrize("most", [48, 49, 47])
@pytest.mark.parametrize("budget", [None, 16])
def test_a_prompt_as_long_as_the_context_is_scored(
    folder: str, roomy: LLM, most: int, budget: int | None, tmp_path: Path
) -> None:
    settings = {"max_num_batched_tokens": budget, "trace": tmp_path / "trace.jsonl"}
    llm = make(folder, most, compile="graph", **settings)  # which is transparent to the bit
    prompts = [prompt_of(most), prompt_of(most - 1), prompt_of(5)]
    found = llm.score(prompts, use_tqdm=False)
    expected = roomy.score(prompts, use_tqdm=False)
    assert [score.logprobs for score in found] == [score.logprobs for score in expected]
    assert [len(score.logprobs) for score in found] == [most, most - 1, 5]
    with pytest.raises(InvalidInputError, match=f"at most {most} tokens"):
        llm.score([prompt_of(most + 1)], use_tqdm=False)
    with pytest.raises(InvalidInputError, match=f"at most {most - 1} tokens"):
        llm.generate([prompt_of(most)], SamplingParams(prompt_logprobs=0), use_tqdm=False)
    verdict = replay.check((tmp_path / "trace.jsonl").read_text().splitlines())
    assert not verdict.property_id, verdict


def test_the_pool_may_hold_less_than_the_context(folder: str) -> None:
    # An answer's last token needs no slot, a prompt's does.
    llm = make(folder, 49, num_blocks=3)
    with pytest.raises(InvalidInputError, match="KV blocks"):
        llm.score([prompt_of(49)], use_tqdm=False)
    assert len(llm.score([prompt_of(48)], use_tqdm=False)[0].logprobs) == 48
    assert len(llm.generate([prompt_of(48)], use_tqdm=False)[0].outputs[0].token_ids) == 1


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"logprobs": 2},
        {"logprobs": 2, "repetition_penalty": 1.5, "logit_bias": {"5": 3}, "bad_words": ["a"]},
        {"logprobs": 2, "min_tokens": 0, "guided_regex": "a+", "stop": "x"},
        {"logprobs": 0, "n": 2, "seed": 1},
        {"prompt_logprobs": 1},
    ],
    ids=str,
)
def test_a_prompt_as_long_as_the_context_is_echoed(
    folder: str, roomy: LLM, fields: dict[str, Any]
) -> None:
    most = 48
    with serving(make(folder, most)) as url, serving(make(folder, 200)) as roomy_url:
        for prompt in (prompt_of(most), "a" * most):
            body = {"prompt": prompt, "add_special_tokens": False, **ECHO, **fields}
            answer = httpx.post(url + COMPLETIONS, json=body, timeout=60)
            assert answer.status_code == 200, answer.text
            expected = httpx.post(roomy_url + COMPLETIONS, json=body, timeout=60).json()
            assert answer.json()["choices"] == expected["choices"]
            assert answer.json()["usage"]["prompt_tokens"] == most
            assert answer.json()["usage"]["completion_tokens"] == 0
        streamed = {**body, "stream": True}
        if "prompt_logprobs" not in fields:
            assert "data: [DONE]" in httpx.post(url + COMPLETIONS, json=streamed, timeout=60).text
        for tokens, more in (most + 1, {}), (most, {"max_tokens": 1}), (most, {"echo": False}):
            refused = {**body, "prompt": prompt_of(tokens), "max_tokens": 0} | more
            error = httpx.post(url + COMPLETIONS, json=refused).json()["error"]
            is_about_length = "echo" not in more
            if is_about_length:
                assert error["code"] == "context_length_exceeded", error
                num_output = more.get("max_tokens", 0)
                assert f"requested {num_output} output tokens" in error["message"]
            else:
                assert error["param"] == "max_tokens"


def test_neighbours_of_such_a_prompt_are_undisturbed(folder: str) -> None:
    most = 48
    with serving(make(folder, most)) as url, httpx.Client(base_url=url, timeout=60) as http:
        plain = {"prompt": [5, 6, 7], "max_tokens": 8, "temperature": 0, "return_token_ids": True}
        alone = http.post(COMPLETIONS, json=plain).json()["choices"][0]["token_ids"]
        for _ in range(3):
            body = {"prompt": [prompt_of(most)] * 3, **ECHO, "logprobs": 1}
            assert http.post(COMPLETIONS, json=body).status_code == 200
            again = http.post(COMPLETIONS, json=plain).json()["choices"][0]["token_ids"]
            assert again == alone
