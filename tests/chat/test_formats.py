"""Response templates: their sources, and that transformers reads them in the same way."""

from __future__ import annotations

import json
from typing import Any

import pytest

from pagespec import SamplingParams
from pagespec.chat.deltas import message_of
from pagespec.chat.formats import AnswerFormat
from pagespec.chat.response import read_response
from tests.support.chat_models import (
    chat_tokenizer,
    ids_of,
    make_reader,
    prompt_of,
)

PARAMS = SamplingParams(max_tokens=None)
# As of models that write one list of calls, between delimiters of which some are patterns.
LISTED = {
    "defaults": {"role": "assistant"},
    "start_anchor": "<|im_start|>assistant\n",
    "fields": {
        "reasoning": {"open_pattern": r"\[think(?:ing)?\]", "close": ["[/think]", "[/thinking]"]},
        "content": {"open": "[say]", "close": "[/say]", "content_args": {"strip": False}},
        "tool_calls": {
            "open": "[calls]",
            "content": "json",
            "transform": {
                "type": "function",
                "function": {"name": "{name}", "arguments": "{arguments}"},
            },
            "transform_each": True,
            "optional": False,
        },
    },
}


@pytest.mark.parametrize("template", [{"fields": {}}, "text", 3])
def test_a_template_that_is_none_is_ignored_with_a_warning(template: Any) -> None:
    tokenizer = chat_tokenizer("qwen3")
    tokenizer.response_template = template
    chat = make_reader("qwen3", tokenizer)
    with pytest.warns(UserWarning, match="response template is ignored: "):
        form = chat.answer_format
    assert isinstance(form, AnswerFormat), "the chat template's is taken"


def read(text: str, template: dict[str, Any]) -> dict[str, Any]:
    tokenizer = chat_tokenizer("qwen3")
    tokenizer.response_template = template
    chat = make_reader(None, tokenizer)
    prompt = prompt_of(chat)
    whole = read_response(chat.reader(prompt, PARAMS), ids_of(tokenizer, text))
    reader, deltas = chat.reader(prompt, PARAMS), []
    for token_id in [i for c in text for i in ids_of(tokenizer, c)]:
        deltas += reader.feed([token_id])
    assert message_of([*deltas, *reader.finish()]) == whole
    return whole


def test_a_format_of_other_fields_and_lists_of_calls() -> None:
    calls = [{"name": name, "arguments": {"a": 1}} for name in ("f", "g")]
    text = f"x[thinking] hm [/thinking]y[say] é [/say]z[calls]{json.dumps(calls)}"
    message = read(text, LISTED)
    assert message["reasoning_content"] == "hm"
    assert message["content"] == " é ", "x, y and z are in no field"
    assert [call["function"]["name"] for call in message["tool_calls"]] == ["f", "g"]
    assert read("[calls][{]", LISTED)["content"] == "[calls][{]"
    assert read("[say]a", LISTED)["content"] == "a"


@pytest.mark.parametrize(
    ("style", "tags"),
    [
        ("qwen3", ("<think>", "</think>")),
        ("qwen3_5", ("<think>", "</think>")),
        ("gemma4", ("<|channel>thought\n", "<channel|>")),
    ],
)
def test_the_texts_that_delimit_reasoning(style: str, tags: tuple[str, str]) -> None:
    form = make_reader(style, chat_tokenizer(style)).answer_format
    assert form is not None
    assert form.reasoning_tags == tags


def test_a_pattern_that_opens_reasoning_is_no_text() -> None:
    tokenizer = chat_tokenizer("qwen3")
    tokenizer.response_template = LISTED
    form = make_reader(None, tokenizer).answer_format
    assert form is not None
    assert form.reasoning_tags is None
