"""`pagespec generate` on conversations gives the answers of `LLM.chat`.

They end where the chat template ends a turn, even if the model's configs have another end token.
"""

from __future__ import annotations

from typing import Any

import pytest

from pagespec import LLM, SamplingParams
from tests.support.chat_models import END
from tests.support.cli_fakes import Desk, start_with
from tests.support.scripted_llm import scripted_llm

THOUGHT = "<think>\nyes or no\n</think>\n\nno, then yes"
FLAGS = ["--max-tokens", "60", "--seed", "0"]
USER = [{"role": "user", "content": "well?"}]


def answering(desk: Desk, monkeypatch: pytest.MonkeyPatch, style: str, text: str) -> LLM:
    """The desk's engine: a whole ``LLM`` whose model has another end token than its template."""
    llm = scripted_llm(style, [text], eos_token_ids=frozenset({0}))
    start_with(monkeypatch, lambda *_, **__: llm)
    return llm


def answer_of_chat(llm: LLM, **params: Any) -> Any:
    asked = SamplingParams(max_tokens=60, seed=0, **params)
    return llm.chat(USER, asked, use_tqdm=False)[0].outputs[0]


@pytest.mark.parametrize("style", sorted(END))
def test_a_prompt_ends_with_its_turn(
    desk: Desk, monkeypatch: pytest.MonkeyPatch, style: str
) -> None:
    answering(desk, monkeypatch, style, "yes")
    result = desk.run("--prompt", "well?", *FLAGS)
    assert result.exit_code == 0, result.output
    assert result.stdout == "yes\n"
    raw = desk.run("--prompt", "well?", "--raw", *FLAGS)
    assert " 60 tokens out" in raw.stderr  # a text has no turns


@pytest.mark.parametrize(
    ("line", "flags"),
    [
        ({"messages": USER}, []),
        ({"messages": USER, "priority": 3, "cache_salt": "s", "owner": "o"}, []),
        ({"prompt": "well?"}, ["--chat"]),
        ({"prompt": "well?", "truncate_prompt_tokens": 5}, ["--chat"]),
    ],
)
def test_lines_of_conversations_end_with_their_turns(
    desk: Desk, monkeypatch: pytest.MonkeyPatch, line: dict[str, Any], flags: list[str]
) -> None:
    answering(desk, monkeypatch, "qwen3", "yes")
    desk.lines(line, {**line, "ignore_eos": True})
    result = desk.run("-i", str(desk.source), "-o", str(desk.output), *FLAGS, *flags)
    assert result.exit_code == 0, result.output
    ends, goes_on = desk.rows()
    assert (ends["text"], ends["finish_reason"]) == ("yes", "stop")
    assert goes_on["finish_reason"] == "length"


@pytest.mark.parametrize("kind", ["--prompt", "messages"])
def test_stop_strings_count_from_the_content(
    desk: Desk, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    llm = answering(desk, monkeypatch, "qwen3", THOUGHT)
    expected = answer_of_chat(llm, stop=["yes"])
    assert expected.finish_reason == "stop"
    if kind == "--prompt":
        text = desk.run("--prompt", "well?", "--stop", "yes", *FLAGS).stdout.removesuffix("\n")
    else:
        desk.lines({"messages": USER})
        desk.run("-i", str(desk.source), "-o", str(desk.output), "--stop", "yes", *FLAGS)
        (row,) = desk.rows()
        text = row["text"]
    assert text == expected.text
    assert "no, then" in text


@pytest.mark.parametrize("option", [{"owner": 3}, {"cache_salt": 1}, {"priority": -1}])
def test_a_refused_option_is_the_error_of_its_line(
    desk: Desk, monkeypatch: pytest.MonkeyPatch, option: dict[str, Any]
) -> None:
    answering(desk, monkeypatch, "qwen3", "yes")
    desk.lines({"messages": USER, **option}, {"messages": USER})
    desk.run("-i", str(desk.source), "-o", str(desk.output), *FLAGS)
    refused, served = desk.rows()
    assert next(iter(option)) in refused["error"]
    assert served["text"] == "yes"
