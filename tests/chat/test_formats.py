"""Response templates: where they come from, and that they are read as transformers reads them."""

from __future__ import annotations

import json
from typing import Any

import pytest
from transformers.utils.chat_parsing import parse_response

from pagespec import SamplingParams
from pagespec.chat.deltas import message_of
from pagespec.chat.formats import fallback_templates, template_of
from pagespec.chat.response import read_response
from tests.support.chat_models import (
    STYLES,
    WEATHER,
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


class NoTemplate:
    response_template = None


def test_transformers_still_has_templates_for_models_without_one() -> None:
    """The table is private. If this fails, answers of these models are not parsed any more."""
    known = {name for types in fallback_templates() for name in types}
    assert {"qwen2", "qwen3", "qwen3_moe", "qwen3_5", "gemma4"} <= known


def test_the_tokenizers_own_template_comes_first() -> None:
    class Own:
        response_template = LISTED

    assert template_of(Own(), "qwen3") == LISTED
    assert template_of(NoTemplate(), "qwen3") is not None
    assert template_of(NoTemplate(), "qwen3_5_text") == template_of(NoTemplate(), "qwen3_5")
    assert template_of(NoTemplate(), "llama") is None
    assert template_of(NoTemplate(), None) is None


def test_a_version_without_the_table_has_no_fallbacks(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    fallback_templates.cache_clear()
    try:
        monkeypatch.setattr("transformers.__file__", str(tmp_path / "__init__.py"))
        assert fallback_templates() == {}
        (tmp_path / "cli" / "serving").mkdir(parents=True)
        (tmp_path / "cli" / "serving" / "utils.py").write_text("import no_such_module")
        fallback_templates.cache_clear()
        assert fallback_templates() == {}
    finally:
        monkeypatch.undo()
        fallback_templates.cache_clear()
    assert fallback_templates()


@pytest.mark.parametrize("template", [{"fields": {}}, "text", 3])
def test_a_template_that_is_none_is_ignored_with_a_warning(template: Any) -> None:
    tokenizer = chat_tokenizer("qwen3")
    tokenizer.response_template = template
    chat = make_reader("qwen3", tokenizer)
    with pytest.warns(UserWarning, match="response template is ignored: "):
        assert chat.answer_format is None


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


@pytest.mark.parametrize("style", STYLES)
def test_it_reads_as_transformers_does(style: str) -> None:
    """But for content before and after a call, of which transformers keeps one."""
    tokenizer = chat_tokenizer(style)
    chat = make_reader(style, tokenizer)
    prompt = prompt_of(chat)
    call = {
        "qwen3": '<tool_call>\n{"name": "weather", "arguments": {"city": "Köln"}}\n</tool_call>',
        "qwen3_5": "<tool_call>\n<function=weather>\n<parameter=city>\nKöln\n</parameter>\n"
        "<parameter=days>\n3\n</parameter>\n</function>\n</tool_call>",
        "gemma4": '<|tool_call>call:weather{city:<|"|>Köln<|"|>,days:3}<tool_call|>',
    }[style]
    opened, closed = {"gemma4": ("<|channel>thought\n", "<channel|>")}.get(
        style, ("<think>", "</think>")
    )
    # White space there is content to transformers' template of Gemma 4, and replaces the content.
    between = "" if style == "gemma4" else "\n"
    template = template_of(NoTemplate(), style)
    assert template is not None
    for text in (
        f"{opened} a\nb {closed}\n\n c d \n{call}{between}{call}",
        f"{opened}a",
        " a ",
        call,
        f"{opened}a{closed}{call}",
    ):
        message = read_response(
            chat.reader(prompt, PARAMS, tools=[WEATHER]), ids_of(tokenizer, text)
        )
        theirs = parse_response(text, template, prefix=prompt.text, tools=[WEATHER])
        assert (message["content"] or None) == theirs.get("content")
        reasoning = theirs.get("reasoning_content", theirs.get("thinking"))
        assert message["reasoning_content"] == reasoning
        functions = [call["function"] for call in message["tool_calls"]]
        arguments = [(f["name"], json.loads(f["arguments"])) for f in functions]
        expected = [call["function"] for call in theirs.get("tool_calls", [])]
        assert arguments == [(f["name"], f["arguments"]) for f in expected]
