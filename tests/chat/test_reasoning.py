"""Constrained output with reasoning: the state after the prompt, the content, and every cut."""

from __future__ import annotations

from functools import cache
from itertools import pairwise
from typing import Any
from unittest.mock import Mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pagespec import SamplingParams, StructuredOutputs
from pagespec.chat.deltas import joined
from pagespec.chat.reader import ChatReader
from pagespec.chat.response import read_response
from pagespec.engine.inputs import PromptReader
from pagespec.engine.request_factory import RequestFactory, Structures
from pagespec.engine.text.reasoning import Phase, Reasoning, ReasoningTracker
from tests.chat.test_response import answers
from tests.support.chat_families import FAMILIES
from tests.support.chat_models import WEATHER, chat_tokenizer, ids_of, make_reader, prompt_of

OPENS, OFF = {"opens_thinking": True}, {"enable_thinking": False}
TEMPLATES: list[dict[str, Any] | None] = [None, OPENS, OFF]
CHOICE = StructuredOutputs(choice=["yes", " x ", "<think>y</think>", '{"a":1}'])
NAMED = {"type": "function", "function": {"name": "weather"}}


@cache
def subject(style: str = "qwen3") -> tuple[Any, ChatReader]:
    if style == "gpt_oss":
        tokenizer, end = FAMILIES[style].tokenizer(), FAMILIES[style].end
        (end_id,) = tokenizer.convert_tokens_to_ids([end])
        prompts = PromptReader(tokenizer, len(tokenizer), 10_000)
        return tokenizer, ChatReader(prompts, tokenizer, eos_token_ids=frozenset({end_id}))
    tokenizer = chat_tokenizer(style)
    return tokenizer, make_reader(style, tokenizer)


def params(**given: Any) -> SamplingParams:
    return SamplingParams(max_tokens=None, structured_outputs=CHOICE, **given)


def read(
    text: str,
    template: dict[str, Any] | None,
    style: str = "qwen3",
    given: SamplingParams | None = None,
    **arguments: Any,
) -> tuple[str | None, str | None]:
    """Reasoning and content; the same for every single cut, and token by token."""
    tokenizer, chat = subject(style)
    ids = ids_of(tokenizer, text)
    prompt = prompt_of(chat, chat_template_kwargs=template)
    asked = given or params()
    message = read_response(chat.reader(prompt, asked, **arguments), ids)
    whole = chat.reader(prompt, asked, **arguments)
    expected = joined([*whole.feed(ids), *whole.finish()])
    for cuts in ([cut] for cut in range(len(ids))):
        reader = chat.reader(prompt, asked, **arguments)
        deltas = [d for a, b in pairwise([0, *cuts, len(ids)]) for d in reader.feed(ids[a:b])]
        assert joined([*deltas, *reader.finish()]) == expected
    reader = chat.reader(prompt, asked, **arguments)
    deltas = [d for i in ids for d in reader.feed([i])]
    assert joined([*deltas, *reader.finish()]) == expected
    return message["reasoning_content"], message["content"]


@pytest.mark.parametrize(
    ("template", "is_open"), [(None, False), (OPENS, True), (OFF, None)], ids=str
)
def test_the_prompt_says_where_the_answer_begins(template: Any, is_open: bool | None) -> None:
    prompt = prompt_of(subject()[1], chat_template_kwargs=template)
    found = None if prompt.reasoning is None else prompt.reasoning.is_open
    assert found == is_open


def test_delimiters_in_the_conversation_are_of_no_account() -> None:
    _, chat = subject()
    for text in ("<think>", "</think>", "a <think> b"):
        prompt = chat.read([{"role": "user", "content": text}])
        assert prompt.reasoning is not None
        assert not prompt.reasoning.is_open


def test_a_message_that_is_continued_is_content_already() -> None:
    _, chat = subject()
    given = {"add_generation_prompt": False, "continue_final_message": True}
    for text, is_open in (("So", None), ("<think>\nSo", True), ("<think>a</think>b", None)):
        messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": text}]
        prompt = chat.read(messages, **given)
        assert (None if prompt.reasoning is None else prompt.reasoning.is_open) == is_open


@pytest.mark.parametrize("text", ["yes", " x ", "<think>y</think>", '{"a":1}'])
def test_content_behind_reasoning_is_read_to_the_last_character(text: str) -> None:
    assert read(f"So é.\n</think>{text}<|im_end|>", OPENS) == ("So é.", text)
    assert read(f"<think>\nSo.\n</think>{text}", None) == ("So.", text)
    assert read(f" \n<think></think>{text}", None) == (None, text)
    if not text.startswith("<think>"):
        assert read(text, None) == (None, text)
    assert read(text, OFF) == (None, text)


def test_reasoning_that_is_cut_has_no_content() -> None:
    assert read("So", OPENS) == ("So", None)
    assert read("So</thi", OPENS) == ("So</thi", None)
    assert read("<think>So<|im_end|>", None) == ("So", None)
    assert read("So<|endoftext|>a</think>yes", OPENS) == ("Soa", "yes")
    assert read("", OPENS) == (None, "")
    assert read("<", None) == (None, "<")
    assert read("<th", None) == (None, "<th")


def test_a_delimiter_may_be_spelled_in_plain_tokens() -> None:
    tokenizer, chat = subject()
    for template, opening in ((OPENS, ""), (None, "<think>")):
        ids = [i for c in f"{opening}a</think>yes" for i in ids_of(tokenizer, c)]
        prompt = prompt_of(chat, chat_template_kwargs=template)
        message = read_response(chat.reader(prompt, params()), ids)
        assert (message["reasoning_content"], message["content"]) == ("a", "yes")


def test_other_delimiters() -> None:
    text = "<|channel>thought\nSo.<channel|>yes<turn|>"
    assert read(text, None, "gemma4") == ("So.", "yes")
    assert read("yes<turn|>", None, "gemma4") == (None, "yes")


@pytest.mark.parametrize(
    "content_type", ["", " <|constrain|>json", "<|constrain|>json", " json", " <|constrain|>a/b "]
)
def test_a_header_of_content_may_name_its_type(content_type: str) -> None:
    final = f"<|channel|>final{content_type}<|message|>yes<|return|>"
    for opening in ("", content_type):
        thought = f"<|channel|>analysis{opening}<|message|>So.<|end|><|start|>assistant"
        reasoning, content = read(thought + final, None, "gpt_oss")
        assert (reasoning, content) == ("So.", "yes")
    twice = f"{thought}<|channel|>analysis<|message|> Well.<|end|><|start|>assistant{final}"
    assert read(twice, None, "gpt_oss") == ("So. Well.", "yes")
    assert read(final, None, "gpt_oss") == (None, "yes")
    tokenizer, chat = subject("gpt_oss")
    ids = [i for c in thought + final for i in ids_of(tokenizer, c)][:-10]  # plain tokens
    message = read_response(chat.reader(prompt_of(chat), params()), ids)
    assert message["content"] == "yes"


def test_an_incomplete_character_before_the_end_is_no_content() -> None:
    tokenizer, chat = subject()
    half = ids_of(tokenizer, "\U0001f600")[:1]
    ids = [*half, *ids_of(tokenizer, "</think>yes")]
    prompt = prompt_of(chat, chat_template_kwargs=OPENS)
    message = read_response(chat.reader(prompt, params()), ids)
    assert message["content"] == "yes"
    assert message["reasoning_content"] == "\ufffd"


@pytest.mark.parametrize("stop", [None, ["never"]])
def test_special_tokens_keep_their_places_behind_an_incomplete_character(
    stop: list[str] | None,
) -> None:
    tokenizer, chat = subject("gemma4")
    prompt = prompt_of(chat, tools=[WEATHER])
    half = ids_of(tokenizer, "\U0001f600")[:1]
    call = '<|tool_call>call:weather{city:<|"|>Köln<|"|>}<tool_call|>'
    ids = [*ids_of(tokenizer, "<|channel>thought\n"), *half]
    ids += ids_of(tokenizer, f"<channel|>So {call}")
    reader = chat.reader(prompt, SamplingParams(stop=stop), tools=[WEATHER])
    message = read_response(reader, ids)
    # The closing delimiter is one special token: the half character is shown behind it.
    assert message["content"] == "\ufffdSo"
    (found,) = message["tool_calls"]
    assert found["function"] == {"name": "weather", "arguments": '{"city": "Köln"}'}


def test_a_forced_call_comes_behind_reasoning() -> None:
    tokenizer, chat = subject()
    for choice, text in (
        (NAMED, '{"city": "Köln"}'),
        ("required", '[{"name": "weather", "parameters": {"city": "Köln"}}]'),
    ):
        for template, before in ((OPENS, "So.</think>"), (None, "<think>So.</think>"), (OFF, "")):
            prompt = prompt_of(chat, chat_template_kwargs=template)
            ids = ids_of(tokenizer, f"{before}{text}<|im_end|>")
            reader = chat.reader(prompt, params(), tools=[WEATHER], tool_choice=choice)
            message = read_response(reader, ids)
            (call,) = message["tool_calls"]
            assert call["function"] == {"name": "weather", "arguments": '{"city": "Köln"}'}
            assert message["reasoning_content"] == (None if template is OFF else "So.")
            assert message["content"] is None


HARMONY = Reasoning(
    b"<|channel|>analysis<|message|>",
    b"<|channel|>final<|message|>",
    False,
    header_end=b"<|message|>",
)
THINK = Reasoning(b"<think>", b"</think>", False)


@pytest.mark.parametrize(
    ("reasoning", "pieces", "num_skipped"),
    [
        (THINK, ["<think>", "a", "</think>", "b"], 3),
        (THINK, ["<", "think", ">\n", "a</thi", "nk>\n\n"], 5),
        (THINK, ["\n", "<think>", "a</think>"], 3),
        (THINK, ["<b"], 0),
        (THINK, ["<", "b"], 0),
        (THINK, ["</think>"], 1),
        (HARMONY, ["<|channel|>", "analysis", "<|message|>", "a", "<|end|>", "<|channel|>",
                   "final", "<|message|>"], 8),
        (HARMONY, ["<|channel|>", "final", "<|message|>"], 3),
        (HARMONY, ["<|channel|>", "commentary"], 0),
        (HARMONY, ["<|channel|>", "final", " ", "<|constrain|>", "js", "on", "<|message|>"], 7),
        (HARMONY, ["<|channel|>", "analysis", " <|constrain|>text", "<|message|>", "a", "<|end|>",
                   "<|channel|>", "final", "<|con", "strain|>json<|message|>"], 10),
        (HARMONY, ["<|channel|>", "final", " to="], 0),
        (HARMONY, ["<|channel|>", "final", "<|return|>"], 0),
        (THINK, ["<think>", "</think", ".</", "think>"], 4),
        (Reasoning(b"<a>", b"aab", True), ["a", "a", "ab"], 3),
    ],
)  # fmt: skip
def test_where_the_content_begins(
    reasoning: Reasoning, pieces: list[str], num_skipped: int
) -> None:
    texts = dict(enumerate(piece.encode() for piece in pieces))
    tracker = ReasoningTracker(reasoning, texts.__getitem__)
    for number in texts:
        if tracker.push(number) is Phase.CONTENT:
            break
    assert tracker.num_skipped == num_skipped
    assert number == max(num_skipped, 1) - 1 or num_skipped == 0


def test_in_the_reasoning_nothing_is_known_of_the_content() -> None:
    tracker = ReasoningTracker(THINK, {0: b"<think>", 1: b"a</th", 2: b"ink"}.__getitem__)
    assert [tracker.push(i) for i in (0, 1, 2)] == [Phase.REASONING] * 3
    assert tracker.num_skipped is None
    assert tracker.num_matched == len("</think")


@settings(max_examples=100, deadline=None)
@given(data=st.data())
def test_the_engine_and_the_reader_find_the_same_end(data: st.DataObject) -> None:
    tokenizer, chat = subject()
    ids = data.draw(answers("qwen3"))
    template = data.draw(st.sampled_from(TEMPLATES))
    constrained, inside = data.draw(st.booleans()), data.draw(st.booleans())
    asked = SamplingParams(
        max_tokens=None,
        ignore_eos=True,
        stop=["STOP", "<"],
        min_tokens=0 if constrained else data.draw(st.integers(0, 4)),
        structured_outputs=CHOICE if constrained else None,
    )
    prompt = prompt_of(chat, chat_template_kwargs=template, stop_in_reasoning=inside)
    factory = RequestFactory(
        tokenizer,
        vocab_size=len(tokenizer),
        eos_token_ids=frozenset({2}),
        max_model_len=1000,
        seed=0,
        structures=Mock(Structures),
    )
    (request,) = factory.make(prompt, asked)
    assert request.on_token is not None
    num = next((n for n, i in enumerate(ids, 1) if request.on_token(i)), len(ids))
    request.token_ids += ids[:num]
    request.finish_reason = "stop"
    text = factory.completion(0, request, prompt).text
    whole = read_response(chat.reader(prompt, asked), ids)
    assert read_response(chat.reader(prompt, asked), ids[:num]) == whole
    if not constrained and not whole["tool_calls"] and "think>" not in text:
        assert (whole["reasoning_content"] or "") + (whole["content"] or "") == text.strip()
