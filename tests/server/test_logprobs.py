"""Log-probabilities in answers: the engine's own floats, in every response format."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import httpx
import pytest

from pagespec import LLM, AsyncLLM
from pagespec.engine.logprob_lists import Logprob
from pagespec.engine.request_factory import RequestFactory
from pagespec.server.app import create_app
from pagespec.server.config import ServerConfig
from pagespec.server.logprob_fields import (
    CompletionLogprobs,
    TokenTexts,
    content_logprobs,
    id_entry,
)
from tests.server.chunks import read_events
from tests.support.chat_models import save_chat_model
from tests.support.models import tiny_model
from tests.support.server import client, serving
from tests.support.tokenizers import byte_fallback, byte_level, unigram

PROMPT = [5, 40, 41, 90, 7, 12]


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> LLM:
    folder = save_chat_model(tmp_path_factory.mktemp("model"))
    return LLM(folder, max_num_seqs=8, num_blocks=200, max_logprobs=-1)


def post(http: httpx.Client, path: str, **body: Any) -> dict[str, Any]:
    answer = http.post(path, json=body)
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


@pytest.mark.parametrize("stream", [False, True])
def test_given_tokens_replace_the_most_likely_ones(http: httpx.Client, stream: bool) -> None:
    asked = {"max_tokens": 1, "temperature": 0, "logprob_token_ids": [50], "seed": 1}
    asked |= {"allowed_token_ids": [42], "return_tokens_as_token_ids": True, "stream": stream}
    shown = {"token_id:42", "token_id:50"}

    def choice(path: str, **body: Any) -> dict[str, Any]:
        answer = http.post(path, json={**asked, **body})
        assert answer.status_code == 200, answer.text
        choices = [c["choices"][0] for c in read_events(answer.text)] if stream else []
        found = [c for c in choices if c["logprobs"]] if stream else answer.json()["choices"]
        return dict(found[0]["logprobs"])

    completion = choice("/v1/completions", prompt=PROMPT, logprobs=5)
    assert completion["tokens"] == ["token_id:42"]
    assert set(completion["top_logprobs"][0]) == shown
    messages = [{"role": "user", "content": "a"}]
    for top in ({"top_logprobs": 5}, {}):
        chat = choice("/v1/chat/completions", messages=messages, logprobs=True, **top)
        assert {entry["token"] for entry in chat["content"][0]["top_logprobs"]} == shown
    for body in ({}, {"logprobs": 1, "echo": True, "max_tokens": 0}):
        refused = http.post("/v1/completions", json={**asked, "prompt": PROMPT, **body})
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "logprob_token_ids")


def test_an_echoed_prompt_is_scored(http: httpx.Client, llm: LLM) -> None:
    """As in lm-eval's requests: one more token is generated and left out of the sum."""
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


def test_generate_has_the_sampled_token_at_least(http: httpx.Client) -> None:
    """As in vLLM, which names tokens by their ids there."""
    params = {"max_tokens": 4, "logprobs": 0, "seed": 1}
    body = {"token_ids": PROMPT, "sampling_params": params}
    (choice,) = post(http, "/inference/v1/generate", **body)["choices"]
    for token_id, entry in zip(choice["token_ids"], choice["logprobs"]["content"], strict=True):
        (top,) = entry.pop("top_logprobs")
        assert top == entry
        assert (top["token"], top["bytes"]) == (f"token_id:{token_id}", None)


def test_minus_one_is_the_whole_vocabulary(http: httpx.Client, llm: LLM) -> None:
    messages = [{"role": "user", "content": "ab"}]
    body = {"messages": messages, "logprobs": True, "top_logprobs": -1, "prompt_logprobs": -1}
    answer = post(http, "/v1/chat/completions", **body, max_tokens=1)
    (entry,) = answer["choices"][0]["logprobs"]["content"]
    values = [top["logprob"] for top in entry["top_logprobs"]]
    num_tokens = len(answer["prompt_logprobs"][1])
    assert len(values) == num_tokens >= len(llm.tokenizer)
    assert values == sorted(values, reverse=True)


@pytest.mark.parametrize("by_default", [False, True])
def test_tokens_are_written_as_ids_by_default_or_on_request(llm: LLM, by_default: bool) -> None:
    asked: dict[str, Any] = {"prompt": PROMPT, "max_tokens": 3, "logprobs": 1, "seed": 1}
    app = create_app(AsyncLLM(llm), ServerConfig(return_tokens_as_token_ids=by_default))

    async def main() -> list[bool]:
        async with client(app) as http:
            bodies = [{**asked, "return_tokens_as_token_ids": x} for x in (None, False, True)]
            answers = [(await http.post("/v1/completions", json=body)).json() for body in bodies]
        await app.state.context.engine.shutdown()
        tokens = [answer["choices"][0]["logprobs"]["tokens"] for answer in answers]
        return [all(token.startswith("token_id:") for token in found) for found in tokens]

    assert asyncio.run(main()) == [by_default, False, True]


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
    """The likeliest answer is first; usage counts all computed answers."""
    asked = {"prompt": PROMPT, "seed": 5, "max_tokens": 5, "logprobs": 0, "ignore_eos": True}
    all_of_them = post(http, "/v1/completions", **asked, n=6)["choices"]
    best = post(http, "/v1/completions", **asked, n=2, best_of=6)
    sums = sorted((sum(c["logprobs"]["token_logprobs"]) for c in all_of_them), reverse=True)
    assert [sum(c["logprobs"]["token_logprobs"]) for c in best["choices"]] == sums[:2]
    assert best["usage"]["completion_tokens"] == 30


class Texts(TokenTexts):
    """A tokenizer that maps ids to given texts."""

    def __init__(self, texts: dict[int, str]) -> None:
        self._known = texts

    def text(self, token_id: int, *, is_beginning: bool = False) -> str:
        return self._known.get(token_id, str(token_id))

    def bytes(self, token_id: int) -> list[int] | None:
        return None

    def is_textless(self, token_id: int) -> bool:
        return False

    def offsets(self, prompt_token_ids: Sequence[int], num_before: int) -> None:
        return None


def test_tokens_of_one_text_have_keys_of_their_own() -> None:
    """U+FFFD is the text of many. The largest value is the greedy choice's, and no other token's
    own value is among those that look like it."""
    found = {7: Logprob(-0.5, 1), 8: Logprob(-0.7, 2), 9: Logprob(-3.0, 3)}
    texts = Texts({7: "\ufffd", 8: "\ufffd", 9: "z"})
    read = CompletionLogprobs(3, texts).read([7, 9, 8], [found] * 3)
    assert read["top_logprobs"] == [
        {"\ufffd": -0.5, "token_id:8": -0.7, "z": -3.0},
        {"z": -3.0, "\ufffd": -0.5, "token_id:8": -0.7},
        {"\ufffd": -0.7, "token_id:7": -0.5, "z": -3.0},
    ]
    assert read["token_logprobs"] == [-0.5, -3.0, -0.7]


class SpacedLLM(NamedTuple):
    """An engine with a SentencePiece tokenizer: "▁answer" and "answer" are two tokens."""

    llm: LLM
    names: dict[str, int]


@pytest.fixture(scope="module", params=[unigram, byte_fallback, byte_level])
def spaced(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> SpacedLLM:
    folder = tmp_path_factory.mktemp("spaced")
    tokenizer = request.param()
    model = tiny_model("llama", num_hidden_layers=1, vocab_size=len(tokenizer))
    model.generation_config.eos_token_id = 2
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return SpacedLLM(LLM(folder, max_num_seqs=8, num_blocks=200), tokenizer.get_vocab())


def test_log_probabilities_point_into_the_text(spaced: SpacedLLM) -> None:
    """With and without the prompt, streamed or not; the greedy choice always has its own entry."""
    with serving(spaced.llm) as url, httpx.Client(base_url=url, timeout=60) as http:
        ids_of = spaced.llm.tokenizer.convert_tokens_to_ids
        # Special tokens among ids are part of the echoed text; one that a tokenizer adds is not.
        ids = [ids_of("<s>"), *spaced.llm.tokenizer("a é")["input_ids"], ids_of("</s>")]
        prompts: list[Any] = ["a é ab", "\U0001f600 a", "<s>a</s>b", ids]
        for number, echo in enumerate((False, True) * len(prompts)):
            prompt = prompts[number // 2]
            asked = {"prompt": prompt, "echo": echo, "seed": number,
                     "max_tokens": 24, "logprobs": 5, "temperature": 1.5, "ignore_eos": True,
                     "return_token_ids": True}  # fmt: skip
            (choice,) = post(http, "/v1/completions", **asked)["choices"]
            logprobs, text = choice["logprobs"], choice["text"]
            num_prompt = len(choice["prompt_token_ids"]) if echo else 0
            if echo and prompt is ids:
                assert text.startswith(spaced.llm.tokenizer.decode(ids))
                assert logprobs["text_offset"][num_prompt - 1] == text.index("</s>")
            rows = zip(
                logprobs["tokens"], logprobs["text_offset"], logprobs["token_logprobs"],
                logprobs["top_logprobs"], strict=True,
            )  # fmt: skip
            for token, place, own, top in rows:
                is_special = token in ("<s>", "</s>", "<unk>")
                if "\ufffd" not in token and not is_special:
                    assert text[place : place + len(token)] == token
                if own is not None:
                    assert top[token] == own
                    assert 5 <= len(top) <= 6
            assert len(logprobs["tokens"]) == num_prompt + len(choice["token_ids"])
            with http.stream("POST", "/v1/completions", json={**asked, "stream": True}) as answer:
                chunks = read_events("".join(answer.iter_text()))
            parts = [c["logprobs"] for chunk in chunks for c in chunk["choices"] if c["logprobs"]]
            for name, values in logprobs.items():
                assert [value for part in parts for value in part[name]] == values


def test_chat_has_the_bytes_of_each_token(spaced: SpacedLLM) -> None:
    texts = TokenTexts(spaced.llm.factory, as_ids=False, skips_special=True)
    found = dict.fromkeys(range(len(spaced.names)), Logprob(-1.0, 1))
    ids = spaced.llm.tokenizer("a\U0001f600é", add_special_tokens=False)["input_ids"]
    entries = content_logprobs(ids, [found] * len(ids), 0, texts.entry)["content"]
    content = b"".join(bytes(entry["bytes"]) for entry in entries)
    assert content.decode().strip() == "a\U0001f600é"
    as_ids = TokenTexts(spaced.llm.factory, as_ids=True, skips_special=True)
    (entry,) = content_logprobs(ids[-1:], [found], 0, as_ids.entry)["content"]
    assert entry["token"] == f"token_id:{ids[-1]}"
    assert entry["bytes"] == entries[-1]["bytes"]


def test_a_mark_of_a_space_tells_two_tokens_apart() -> None:
    tokenizer = unigram()
    names = tokenizer.get_vocab()
    factory = RequestFactory(
        tokenizer,
        vocab_size=len(tokenizer),
        eos_token_ids=frozenset({2}),
        max_model_len=99,
        seed=0,
    )
    texts = TokenTexts(factory, as_ids=False, skips_special=True)
    spaced, plain, first = names["▁answer"], names["answer"], names["a"]
    found = {plain: Logprob(-6.39, 40), spaced: Logprob(-0.0017, 1)}
    read = CompletionLogprobs(1, texts, [1, first]).read([plain], [found])
    assert read["top_logprobs"] == [{"answer": -6.39, " answer": -0.0017}]
    # At the beginning of a text the decoder strips the space.
    read = CompletionLogprobs(1, texts, [1]).read([spaced, spaced], [found] * 2)
    assert read["tokens"] == ["answer", " answer"]
    assert read["text_offset"] == [0, 6]
    read = CompletionLogprobs(2, texts, [1]).read([spaced], [found | {plain: Logprob(-1.0, 2)}])
    assert read["top_logprobs"] == [{"answer": -0.0017, f"token_id:{plain}": -1.0}]


def test_numbers_that_json_lacks() -> None:
    found = {1: Logprob(-math.inf, 2), 0: Logprob(math.nan, 1)}
    (entry,) = content_logprobs([1], [found], 1, id_entry)["content"]
    assert entry["logprob"] == -9999.0
    assert entry["top_logprobs"][0]["logprob"] is None
