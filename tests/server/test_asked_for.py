"""An answer has all that its request selected; a request that fails by its own fault gets 400."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from pagespec import LLM
from tests.server.chunks import joined_answer, read_events
from tests.support.chat_models import save_chat_model
from tests.support.server import serving

HELLO = [{"role": "user", "content": "hé?"}]
COMPLETIONS, CHAT, GENERATE = "/v1/completions", "/v1/chat/completions", "/inference/v1/generate"


@pytest.fixture(scope="module")
def http(tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    folder = save_chat_model(tmp_path_factory.mktemp("model"))
    llm = LLM(folder, max_num_seqs=8, num_blocks=200, compile="eager")
    with serving(llm) as url, httpx.Client(base_url=url, timeout=60) as http:
        yield http


# Its automaton is too large to be walked, which shows as tokens are sampled.
HUGE = {"structured_outputs": {"regex": "[ab]{20}a{1000000}"}}
# Behind the first "b", all that is allowed is banned.
NOTHING = {"bad_words": ["bb"]}


@pytest.mark.parametrize(
    ("fields", "reason"), [(HUGE, "structured_outputs: "), (NOTHING, "no token to sample")]
)
def test_a_request_that_ends_itself_is_refused(
    http: httpx.Client, fields: dict[str, Any], reason: str
) -> None:
    if fields is NOTHING:
        tokens = http.post("/tokenize", json={"prompt": "b", "add_special_tokens": False}).json()
        fields = {**fields, "allowed_token_ids": tokens["tokens"]}
    body = {"prompt": "a", "max_tokens": 40, **fields}
    answer = http.post(COMPLETIONS, json=body)
    error = answer.json()["error"]
    assert (answer.status_code, error["code"], error["type"]) == (400, 400, "BadRequestError")
    assert reason in error["message"]
    streamed = read_events(http.post(COMPLETIONS, json={**body, "stream": True}).text)[-1]
    assert (streamed["error"]["code"], streamed["error"]["type"]) == (400, "BadRequestError")
    assert reason in streamed["error"]["message"]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"guided_regex": "(?=a)b"}, "guided_regex"),
        ({"structured_outputs": {"regex": "(?=a)b"}}, "structured_outputs.regex"),
    ],
)
def test_what_cannot_be_compiled_is_named(
    http: httpx.Client, fields: dict[str, Any], param: str, stream: bool
) -> None:
    answer = http.post(COMPLETIONS, json={"prompt": "a", "stream": stream, **fields})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)


def test_generate_streams_the_prompt_once(http: httpx.Client) -> None:
    params = {"max_tokens": 4, "n": 2, "seed": 1}
    body = {"token_ids": [5, 6], "sampling_params": params, "return_token_ids": True}
    chunks = read_events(http.post(GENERATE, json={**body, "stream": True}).text)
    assert [chunk.get("prompt_token_ids") for chunk in chunks] == [
        [5, 6],
        *[None] * (len(chunks) - 1),
    ]
    whole = http.post(GENERATE, json=body).json()
    assert joined_answer(chunks)["prompt_token_ids"] == whole["prompt_token_ids"]
    plain = {**body, "stream": True, "return_token_ids": False}
    assert "prompt_token_ids" not in http.post(GENERATE, json=plain).text


@pytest.mark.parametrize("more", [{}, {"stop": "zzz"}])
def test_tokens_of_a_conversation_have_their_text(http: httpx.Client, more: Any) -> None:
    body = {"messages": HELLO, "max_tokens": 2, "seed": 1, "prompt_logprobs": 0, **more}
    entries = http.post(CHAT, json=body).json()["prompt_logprobs"]
    texts = [entry["decoded_token"] for found in entries[1:] for entry in found.values()]
    assert all(isinstance(text, str) for text in texts)
    assert "user" in "".join(texts)


@pytest.mark.parametrize("add", [None, True, False])
@pytest.mark.parametrize("stream", [False, True])
def test_an_echo_is_what_was_sent(http: httpx.Client, add: bool | None, stream: bool) -> None:
    prompts = ["<s>hello</s>", "a<s>"]
    for prompt in (prompts[0], prompts):
        body = {"prompt": prompt, "echo": True, "max_tokens": 0, "add_special_tokens": add}
        answer = http.post(COMPLETIONS, json={**body, "stream": stream})
        whole = joined_answer(read_events(answer.text)) if stream else answer.json()
        expected = [prompt] if isinstance(prompt, str) else prompt
        assert [choice["text"] for choice in whole["choices"]] == expected


@pytest.mark.parametrize("add", [None, True])
def test_conversations_of_any_length_are_counted(http: httpx.Client, add: bool | None) -> None:
    def count(content: str) -> int:
        body = {
            "messages": [{"role": "user", "content": content}],
            "add_special_tokens": add,
        }
        answer = http.post("/tokenize", json=body)
        assert answer.status_code == 200, answer.text
        found = answer.json()
        assert found["count"] == len(found["tokens"])
        return int(found["count"])

    limit = http.get("/v1/models").json()["data"][0]["max_model_len"]
    long = count("b" * (2 * limit))
    assert long == count("b") + 2 * limit - 1 > limit


def test_no_name_is_all_names(http: httpx.Client) -> None:
    assert http.get("/v1/models/").json() == http.get("/v1/models").json()
