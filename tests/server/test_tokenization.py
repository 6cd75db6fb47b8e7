"""Text to tokens and back, over a tiny model whose tokens are bytes."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx
import pytest
from fastapi import FastAPI

from pagespec import LLM, AsyncLLM
from pagespec.server.app import create_app
from tests.support.content_llm import content_llm
from tests.support.server import client
from tests.support.structured import save_byte_model, tokenizer

TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}{{ extra }}"
)
MESSAGES = [{"role": "user", "content": "ab é"}]


@pytest.fixture(scope="module")
def app(tmp_path_factory: pytest.TempPathFactory) -> FastAPI:
    llm = LLM(save_byte_model(tmp_path_factory.mktemp("bytes")), compile="eager", num_blocks=16)
    llm.tokenizer.chat_template = TEMPLATE
    return create_app(AsyncLLM(llm))


def post(app: FastAPI, path: str, body: Any) -> httpx.Response:
    async def call() -> httpx.Response:
        async with client(app) as http:
            headers = {"Content-Type": "application/json"}
            return await http.post(path, content=json.dumps(body), headers=headers)

    return asyncio.run(call())


@pytest.mark.parametrize("text", ["ab", "a\n é \U0001f600", "x" * 5000, ""])
def test_a_text_comes_back(app: FastAPI, text: str) -> None:
    answer = post(app, "/tokenize", {"prompt": text, "return_token_strs": True}).json()
    expected = tokenizer()(text)["input_ids"]
    assert answer["tokens"] == expected
    assert answer["count"] == len(expected) == len(answer["token_strs"])
    assert answer["max_model_len"] == app.state.context.engine.llm.max_model_len
    assert post(app, "/detokenize", {"tokens": expected}).json() == {"prompt": text}


def test_a_conversation_is_written_by_the_template(app: FastAPI) -> None:
    def text_of(**more: Any) -> str:
        answer = post(app, "/tokenize", {"messages": MESSAGES, **more}).json()
        assert answer["token_strs"] is None
        text: str = post(app, "/detokenize", {"tokens": answer["tokens"]}).json()["prompt"]
        return text

    assert text_of() == "<user>ab é<assistant>"
    assert text_of(add_generation_prompt=False) == "<user>ab é"
    assert text_of(chat_template_kwargs={"extra": "!"}) == "<user>ab é<assistant>!"
    assert text_of(add_special_tokens=True).endswith("<user>ab é<assistant>")


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": "a", "messages": MESSAGES}, "prompt"),
        ("/tokenize", {"prompt": "a", "surprise": 1}, "surprise"),
        ("/tokenize", {"prompt": ["a"]}, "prompt"),
        ("/tokenize", {"prompt": "\ud800"}, "prompt"),
        ("/tokenize", {"messages": []}, "messages"),
        ("/tokenize", {"messages": [{"role": "user"}]}, "messages[0]"),
        ("/detokenize", {}, "tokens"),
        ("/detokenize", {"tokens": [1, -1]}, "tokens"),
        ("/detokenize", {"tokens": [1 << 70]}, "tokens"),
        ("/detokenize", {"tokens": [0.5]}, "tokens.0"),
    ],
)
def test_what_is_wrong_is_named(app: FastAPI, path: str, body: Any, param: str) -> None:
    answer = post(app, path, body)
    error = answer.json()["error"]
    assert (answer.status_code, error["code"], error["type"]) == (400, 400, "BadRequestError")
    assert str(error["param"]).startswith(param)
    assert param.partition("[")[0].partition(".")[0] in error["message"]


@pytest.mark.parametrize("body", [{"model": "\udc80", "prompt": "a"}, {"\udc80": 1}])
def test_what_is_no_unicode_is_answered(app: FastAPI, body: Any) -> None:
    answer = post(app, "/tokenize", body)
    assert answer.status_code in (400, 404)
    assert answer.json()["error"]["message"]


def test_another_model_is_not_found(app: FastAPI) -> None:
    assert post(app, "/tokenize", {"model": "other", "prompt": "a"}).status_code == 404


def test_what_a_client_must_know_of_the_tokenizer(app: FastAPI) -> None:
    async def call(app: FastAPI) -> httpx.Response:
        async with client(app) as http:
            return await http.get("/tokenizer_info")

    info = asyncio.run(call(app)).json()
    assert (info["bos_token"], info["eos_token"]) == ("<s>", "</s>")
    assert info["chat_template"] == TEMPLATE
    assert "Tokenizer" in info["tokenizer_class"]
    letters = asyncio.run(call(create_app(AsyncLLM(content_llm())))).json()
    assert letters == {"tokenizer_class": "LetterTokenizer"}
