"""Parsing of answers from tokens; the result does not depend on how the tokens arrive."""

from __future__ import annotations

import json
from functools import cache
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pagespec import SamplingParams
from pagespec.chat.deltas import ContentDelta, Delta, ReasoningDelta, joined, message_of
from pagespec.chat.reader import ChatReader
from pagespec.chat.response import read_response
from pagespec.engine.text.detokenizer import decode_output
from tests.support.chat_models import (
    END,
    STYLES,
    WEATHER,
    chat_tokenizer,
    ids_of,
    make_reader,
    prompt_of,
)

PLAIN = SamplingParams(max_tokens=None)


@cache
def subject(style: str) -> tuple[Any, ChatReader]:
    tokenizer = chat_tokenizer(style)
    return tokenizer, make_reader(style, tokenizer)


def read(
    style: str,
    text: str | list[int],
    params: SamplingParams = PLAIN,
    template: dict[str, Any] | None = None,
    **arguments: Any,
) -> dict[str, Any]:
    tokenizer, chat = subject(style)
    prompt = prompt_of(chat, chat_template_kwargs=template)
    ids = ids_of(tokenizer, text) if isinstance(text, str) else text
    return read_response(chat.reader(prompt, params, **arguments), ids)


def calls_of(message: dict[str, Any]) -> list[tuple[str, Any]]:
    functions = [call["function"] for call in message["tool_calls"]]
    return [(f["name"], json.loads(f["arguments"])) for f in functions]


QWEN3_CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Köln"}}\n</tool_call>'
QWEN3_5_CALL = (
    "<tool_call>\n<function=weather>\n<parameter=city>\nKöln\n</parameter>\n"
    "<parameter=days>\n3\n</parameter>\n</function>\n</tool_call>"
)
GEMMA_CALL = '<|tool_call>call:weather{city:<|"|>Köln<|"|>,days:3}<tool_call|>'
CALLS = {
    "qwen3": (QWEN3_CALL, {"city": "Köln"}),
    "qwen3_5": (QWEN3_5_CALL, {"city": "Köln", "days": 3}),
    "gemma4": (GEMMA_CALL, {"city": "Köln", "days": 3}),
}
THOUGHTS = {
    "qwen3": ("<think>", "</think>"),
    "qwen3_5": ("<think>", "</think>"),
    "gemma4": ("<|channel>thought\n", "<channel|>"),
}


@pytest.mark.parametrize("style", STYLES)
def test_reasoning_content_and_a_call(style: str) -> None:
    opened, closed = THOUGHTS[style]
    call, arguments = CALLS[style]
    text = f"{opened}\nSo é.\n{closed}\n\nLet me  see.\n{call}\n{call}{END[style]}"
    message = read(style, text, tools=[WEATHER], request_id="7")
    assert message["role"] == "assistant"
    assert message["reasoning_content"] == "So é."
    assert message["content"] == "Let me  see."
    assert calls_of(message) == [("weather", arguments)] * 2
    ids = [call["id"] for call in message["tool_calls"]]
    assert len(set(ids)) == 2
    assert all(len(i) == 29 and i.startswith("call_") and int(i[5:], 16) >= 0 for i in ids)
    again = read(style, text, tools=[WEATHER], request_id="7")
    assert again == message
    assert read(style, text, tools=[WEATHER], request_id="8") != message


@pytest.mark.parametrize("style", STYLES)
def test_calls_alone_have_no_content(style: str) -> None:
    call, arguments = CALLS[style]
    message = read(style, call + END[style], tools=[WEATHER])
    assert message["content"] is None
    assert message["reasoning_content"] is None
    assert calls_of(message) == [("weather", arguments)]


@pytest.mark.parametrize("style", STYLES)
def test_without_tools_to_choose_from_a_call_is_content(style: str) -> None:
    call, _ = CALLS[style]
    message = read(style, "a" + call + END[style], tool_choice="none")
    assert message["content"] == "a" + call
    assert message["tool_calls"] == []


MALFORMED = [
    ("qwen3", 'a \n<tool_call>\n{"name": "weather", "arg}\n</tool_call>'),
    ("qwen3", "a<tool_call></tool_call>"),
    ("qwen3", '<tool_call>["weather"]</tool_call>'),
    ("qwen3", '<tool_call>{"name": 3, "arguments": {}}</tool_call>'),
    ("qwen3", '<tool_call>{"name": "weather", "arguments": 3}</tool_call>'),
    ("qwen3", '<tool_call>{"name": "weather", "arguments": {"a": 1e999}}</tool_call>'),
    ("qwen3", '<tool_call>{"name": "weather", "arguments": {"a": NaN}}</tool_call>'),
    ("qwen3", '<tool_call>{"name": "weather\\ud800", "arguments": {}}</tool_call>'),
    ("qwen3", "<tool_call>" + "[" * 5000 + "</tool_call>"),
    ("qwen3", '<tool_call>{"name": "weather", "arguments": {}}'),  # cut by length
    ("qwen3", '<tool_call>{"name": "weather", "arguments": {}}</tool_c'),
    ("qwen3_5", "<tool_call>\n<function=weather>\n<parameter=city>\nKöln\n</parameter>"),
    ("qwen3_5", "<tool_call>\nfunction\n</tool_call>"),
    ("gemma4", '<|tool_call>call:weather{city:<|"|>Köln}<tool_call|>'),
    ("gemma4", '<|tool_call>call:weather{city:<|"|>Kö'),
    ("gemma4", "<|tool_call>call:weather{}\x01<tool_call|>"),
]


@pytest.mark.parametrize(("style", "text"), MALFORMED)
def test_what_is_no_call_is_content_to_the_last_character(style: str, text: str) -> None:
    message = read(style, text, tools=[WEATHER])
    assert message == {
        "role": "assistant",
        "content": text,
        "reasoning_content": None,
        "tool_calls": [],
    }
    assert read(style, f"{text}{END[style]}", tools=[WEATHER]) == message, "no end token leaks"
    ignored = SamplingParams(max_tokens=None, ignore_eos=True)
    assert read(style, f"{text}</s>", ignored, tools=[WEATHER]) == message, "nor any other"


def test_a_malformed_call_does_not_disturb_those_beside_it() -> None:
    bad = "<tool_call>{]</tool_call>"
    message = read("qwen3", f"a{QWEN3_CALL}b{bad}{QWEN3_CALL} c", tools=[WEATHER])
    assert message["content"] == f"ab{bad} c"
    assert len(message["tool_calls"]) == 2


def test_an_argument_json_cannot_spell_stays_escaped() -> None:
    text = '<tool_call>{"name": "weather", "arguments": {"city": "\\ud800"}}</tool_call>'
    (call,) = read("qwen3", text)["tool_calls"]
    assert call["function"]["arguments"] == '{"city": "\\ud800"}'


def test_a_template_may_open_or_close_the_thinking() -> None:
    opens, closed = {"opens_thinking": True}, {"enable_thinking": False}
    message = read("qwen3", "So.\n</think>\n\nYes.<|im_end|>", template=opens)
    assert (message["reasoning_content"], message["content"]) == ("So.", "Yes.")
    message = read("qwen3", "So", template=opens)
    assert (message["reasoning_content"], message["content"]) == ("So", None)
    message = read("qwen3", "Yes.", template=closed)
    assert (message["reasoning_content"], message["content"]) == (None, "Yes.")


def test_special_tokens_show_where_they_are_asked_for() -> None:
    text = "a<|endoftext|>b<s>c"
    assert read("qwen3", text)["content"] == "abc"
    params = SamplingParams(max_tokens=None, skip_special_tokens=False)
    assert read("qwen3", f"a<s>b{END['qwen3']}", params)["content"] == "a<s>b"


def test_the_parser_sees_what_is_before_a_stop_string() -> None:
    text = f"a{QWEN3_CALL}b STOP c"
    for include, content in ((False, "ab "), (True, "ab STOP")):
        params = SamplingParams(max_tokens=None, stop=["STOP"], include_stop_str_in_output=include)
        message = read("qwen3", text, params)
        assert message["content"] == content.rstrip()
        assert len(message["tool_calls"]) == 1
    params = SamplingParams(max_tokens=None, stop=["STOP"])
    _, chat = subject("qwen3")
    for in_reasoning, content in ((True, None), (False, "b")):
        prompt = prompt_of(chat, stop_in_reasoning=in_reasoning)
        ids = ids_of(subject("qwen3")[0], "<think>a STOP</think>bSTOP")
        cut = read_response(chat.reader(prompt, params), ids)
        assert cut["content"] == content
        assert cut["reasoning_content"] == ("a" if in_reasoning else "a STOP")
    # A special token stands between the letters of no stop string, as in `generate`.
    split = read("qwen3", "aST<|endoftext|>OPb", SamplingParams(max_tokens=None, stop=["STOP"]))
    assert split["content"] == "a"


def test_a_stop_token_may_close_a_call() -> None:
    tokenizer, _ = subject("qwen3")
    close = tokenizer.convert_tokens_to_ids("</tool_call>")
    for include in (False, True):
        params = SamplingParams(
            max_tokens=None, stop_token_ids=[close], include_stop_str_in_output=include
        )
        assert len(read("qwen3", QWEN3_CALL + "no more", params)["tool_calls"]) == 1
    params = SamplingParams(max_tokens=None, stop_token_ids=[close])
    assert read("qwen3", "a</tool_call>b", params)["content"] == "a"


def test_a_message_that_is_continued_is_not_given_twice() -> None:
    tokenizer, chat = subject("qwen3")
    messages = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": f"b{QWEN3_CALL}\n<tool_call>\n{{"},
    ]
    prompt = chat.read(messages, add_generation_prompt=False, continue_final_message=True)
    assert prompt.text is not None
    assert prompt.text.endswith("{")
    text = '"name": "weather", "arguments": {}}\n</tool_call> c'
    message = read_response(chat.reader(prompt, PLAIN), ids_of(tokenizer, text))
    assert message["content"] == "c"
    assert [call["function"]["arguments"] for call in message["tool_calls"]] == ["{}"]
    message = read_response(chat.reader(prompt, PLAIN), ids_of(tokenizer, "no"))
    assert message["content"] == "no"


def test_a_model_of_no_known_format_gives_the_text_of_generate() -> None:
    tokenizer = chat_tokenizer("plain")
    chat = make_reader(None, tokenizer)
    assert chat.answer_format is None
    prompt = prompt_of(chat)
    ids = ids_of(tokenizer, f"  <think>a</think> é<s>{QWEN3_CALL} \n</s>")
    message = read_response(chat.reader(prompt, PLAIN), ids)
    assert message["content"] == decode_output(tokenizer, prompt.token_ids, ids[:-1])
    assert message["reasoning_content"] is None


def stream(style: str, ids: list[int], cuts: list[int], params: SamplingParams) -> list[Delta]:
    _, chat = subject(style)
    prompt = prompt_of(
        chat,
        chat_template_kwargs={"opens_thinking": len(ids) % 2 == 0},
        stop_in_reasoning=len(ids) % 3 == 0,
    )
    reader = chat.reader(prompt, params, tools=[WEATHER], request_id="1")
    ends = [0, *cuts, len(ids)]
    deltas = [d for a, b in pairwise(ends) for d in reader.feed(ids[a:b])]
    return joined([*deltas, *reader.finish()])


@st.composite
def answers(draw: st.DrawFn, style: str) -> list[int]:
    tokenizer, _ = subject(style)
    opened, closed = THOUGHTS[style]
    call, _ = CALLS[style]
    texts = ["a", "é語", "\U0001f600", " ", "\n", "<", "STOP", "ST", "{", '"', opened, closed, call,
             call[: len(call) // 2], call.split("weather")[0], call[-12:], "</s>", END[style],
             opened[:4], closed[:3], "\ufffd"]  # fmt: skip
    parts = draw(st.lists(st.one_of(st.sampled_from(texts), st.text(max_size=3)), max_size=12))
    ids: list[int] = []
    for part in parts:
        # Delimiters are mostly one token; some in their bytes, as a model may write them too.
        if draw(st.booleans()):
            ids += ids_of(tokenizer, part)
        else:
            ids += [i for c in part for i in ids_of(tokenizer, c)]
    if draw(st.booleans()):
        ids = [i for i in ids if draw(st.integers(0, 9))]  # bytes are missing here and there
    return ids


@pytest.mark.parametrize("style", STYLES)
@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_every_way_of_cutting_gives_the_same(style: str, data: st.DataObject) -> None:
    ids = data.draw(answers(style))
    params = SamplingParams(
        max_tokens=None,
        stop=["STOP"] if data.draw(st.booleans()) else None,
        include_stop_str_in_output=data.draw(st.booleans()),
        skip_special_tokens=data.draw(st.booleans()),
        ignore_eos=data.draw(st.booleans()),
    )
    whole = stream(style, ids, [], params)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(ids)), max_size=6)))
    assert stream(style, ids, cuts, params) == whole
    assert stream(style, ids, list(range(len(ids))), params) == whole, "token by token"


@pytest.mark.parametrize("style", ["qwen3", "qwen3_5"])
@settings(max_examples=100, deadline=None)
@given(data=st.data())
def test_no_text_is_lost(style: str, data: st.DataObject) -> None:
    """But delimiters, and white space; that of the end may be spelled in plain tokens, too."""
    tokenizer, chat = subject(style)
    ids = data.draw(answers(style))
    prompt = prompt_of(chat)
    params = SamplingParams(max_tokens=None, ignore_eos=True)
    reader = chat.reader(prompt, params, tool_choice="none")
    deltas = joined([*reader.feed(ids), *reader.finish()])
    given = decode_output(tokenizer, prompt.token_ids, ids)
    read = "".join(d.text for d in deltas)  # type: ignore[union-attr]
    for delimiter in (*THOUGHTS[style], END[style]):
        given, read = given.replace(delimiter, ""), read.replace(delimiter, "")
    assert "".join(read.split()) == "".join(given.split())


@pytest.mark.parametrize("style", STYLES)
def test_every_single_cut_of_a_long_answer(style: str) -> None:
    tokenizer, _ = subject(style)
    opened, closed = THOUGHTS[style]
    call, _ = CALLS[style]
    text = f"{opened}é{closed}\n\U0001f600\n{call}x{call[:-5]}{END[style]}"
    ids = [i for c in text for i in ids_of(tokenizer, c)] + ids_of(tokenizer, text)
    whole = stream(style, ids, [], PLAIN)
    assert any(isinstance(d, ReasoningDelta) for d in whole) or style == "gemma4"
    for cut in range(len(ids)):
        assert stream(style, ids, [cut], PLAIN) == whole


def test_content_streams_as_it_comes() -> None:
    tokenizer, chat = subject("qwen3")
    reader = chat.reader(prompt_of(chat), PLAIN)
    ids = ids_of(tokenizer, "<think>ab</think>cd")
    deltas = [reader.feed([i]) for i in ids]
    assert deltas == [
        [], [ReasoningDelta("ab")], [], [ContentDelta("c")], [ContentDelta("d")]
    ]  # fmt: skip
    assert reader.finish() == []
    assert message_of([]) == {
        "role": "assistant",
        "content": "",
        "reasoning_content": None,
        "tool_calls": [],
    }
