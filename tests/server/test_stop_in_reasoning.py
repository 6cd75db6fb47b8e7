"""In chat, stop strings apply from the beginning of the content, over HTTP and offline."""

from __future__ import annotations

import re
from typing import Any

import httpx
import pytest

from pagespec import LLM, InvalidInputError, SamplingParams
from tests.server.chunks import alike, joined_answer, read_events
from tests.support.scripted_llm import scripted_llm

HELLO = [{"role": "user", "content": "hé?"}]
OPENS = {"opens_thinking": True}
# What is generated, and whether the prompt has opened the reasoning.
ANSWERS = [
    ("Is 9.8 > 9.11? é\n</think>\n\nIt is 9.8, é.", True),
    ("<think>\n9.8 é</think>No 9.8 9.8", False),
    ("9.8 at once", False),
    ("<9.8", False),
    ("<think>9.8 never closed", False),
    ("\n <think>9.8</think>9.8", False),
    ("9</think>.8 9.8", True),
    ("no </thi 9.8</think>", True),
    ("</think>9.8", False),
]
STOPS = ["9.8", "é", "</think>", "<", "nothing", ".8 9", "9</think>.8"]


@pytest.fixture(scope="module")
def llm() -> LLM:
    return scripted_llm("qwen3", [text for text, _ in ANSWERS], max_num_seqs=3)


def expected(text: str, is_open: bool, stop: str, include: bool) -> tuple[str, str, bool]:
    """Reasoning and content of a written answer, and whether the stop string ends it; from the text
    alone."""
    opening = re.match(r"\s*<think>", text)
    before, content = "", text
    if is_open or opening:
        before, closing, content = text[0 if is_open or not opening else opening.end() :].partition(
            "</think>"
        )
        if not closing:
            return before.strip(), "", False
    elif text.startswith("</think>"):
        content = text[len("</think>") :]
    place = content.find(stop)
    if place >= 0:
        content = content[: place + (len(stop) if include else 0)]
    return before.strip(), content.strip(), place >= 0


def ask(http: httpx.Client, number: int, **body: Any) -> dict[str, Any]:
    _, is_open = ANSWERS[number]
    given = {"messages": HELLO, "seed": number, "max_tokens": 200, "ignore_eos": False} | body
    if is_open:
        given["chat_template_kwargs"] = OPENS
    whole = http.post("/v1/chat/completions", json=given)
    assert whole.status_code == 200, whole.text
    streaming = {**given, "stream": True, "stream_options": {"include_usage": True}}
    streamed = http.post("/v1/chat/completions", json=streaming)
    assert alike(joined_answer(read_events(streamed.text))) == alike(whole.json())
    (choice,) = whole.json()["choices"]
    return dict(choice)


@pytest.mark.parametrize("include", [False, True])
@pytest.mark.parametrize("stop", STOPS)
@pytest.mark.parametrize("number", range(len(ANSWERS) - 1))
def test_a_stop_string_counts_from_the_content_on(
    http: httpx.Client, number: int, stop: str, include: bool
) -> None:
    text, is_open = ANSWERS[number]
    reasoning, content, is_stopped = expected(text, is_open, stop, include)
    choice = ask(http, number, stop=[stop], include_stop_str_in_output=include)
    message = choice["message"]
    assert (message["reasoning_content"] or "", message["content"] or "") == (reasoning, content)
    assert choice["finish_reason"] == "stop"
    assert choice["stop_reason"] == (stop if is_stopped else None)


def test_content_behind_a_delimiter_without_reasoning(http: httpx.Client) -> None:
    number = len(ANSWERS) - 1
    choice = ask(http, number, stop=["9.8"])
    assert choice["stop_reason"] == "9.8"
    assert "9.8" not in choice["message"]["content"]


def test_the_other_meaning(http: httpx.Client) -> None:
    choice = ask(http, 0, stop=["9.8"], stop_in_reasoning=True)
    assert choice["message"]["reasoning_content"] == "Is"
    assert choice["message"]["content"] is None
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", "9.8")
    choice = ask(http, 1, stop=["9.8"], stop_in_reasoning=True)
    assert (choice["message"]["reasoning_content"], choice["message"]["content"]) == (None, "")


def test_stop_tokens_count_everywhere(http: httpx.Client, llm: LLM) -> None:
    (question,) = llm.tokenizer("?", add_special_tokens=False)["input_ids"]
    choice = ask(http, 0, stop_token_ids=[question], stop=["nothing"])
    assert choice["message"]["reasoning_content"] == "Is 9.8 > 9.11"
    assert (choice["message"]["content"], choice["stop_reason"]) == (None, question)


def test_min_tokens_and_max_tokens_count_all(http: httpx.Client, llm: LLM) -> None:
    num_first = len(llm.tokenizer("9</think>.8 9.8", add_special_tokens=False)["input_ids"])
    choice = ask(http, 6, stop=["9.8"], min_tokens=num_first - 1)
    assert choice["stop_reason"] == "9.8"
    choice = ask(http, 6, stop=["9.8"], min_tokens=num_first)
    assert choice["stop_reason"] is None
    assert choice["message"]["content"] == ".8 9.8"
    choice = ask(http, 6, stop=["9.8"], max_tokens=4)
    assert (choice["finish_reason"], choice["message"]["content"]) == ("length", ".8")


def test_offline_and_completions(http: httpx.Client, llm: LLM) -> None:
    params = SamplingParams(max_tokens=200, seed=0, stop=["9.8"])
    arguments: dict[str, Any] = {"use_tqdm": False, "chat_template_kwargs": OPENS}
    (output,) = llm.chat(HELLO, params, **arguments)
    answer = output.outputs[0]
    assert answer.text == "Is 9.8 > 9.11? é\n</think>\n\nIt is "
    assert (answer.finish_reason, answer.stop_reason) == ("stop", "9.8")
    assert answer.message is not None
    assert answer.message["content"] == "It is"
    (other,) = llm.chat(HELLO, params, stop_in_reasoning=True, **arguments)
    assert other.outputs[0].text == "Is "
    prompt = llm.chat_reader.read(HELLO, chat_template_kwargs=OPENS)
    assert "".join(llm.stream(prompt, params)) == answer.text
    # A prompt that is not a conversation: stop strings apply to the whole text.
    (plain,) = llm.generate(prompt.text, params, use_tqdm=False)
    assert plain.outputs[0].text == "Is "
    served = http.post("/v1/completions", json={"prompt": prompt.text, "seed": 0, "stop": "9.8"})
    assert served.json()["choices"][0]["text"] == "Is "
    with pytest.raises(InvalidInputError, match="stop_in_reasoning"):
        llm.chat(HELLO, params, stop_in_reasoning=1, **arguments)  # type: ignore[arg-type]
