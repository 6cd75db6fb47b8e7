"""`pagespec chat`: history, rejected input, and errors after which it continues."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from pagespec.chat.deltas import ContentDelta, Delta, ReasoningDelta
from pagespec.cli import chat
from pagespec.cli.chat import ctrl_c_sets
from pagespec.cli.main import app
from pagespec.engine.sampling_params import SamplingParams
from pagespec.errors import InvalidInputError
from tests.support.cli_fakes import chat_reader, start_with


class FakeTokenizer:
    chat_template: str | None = "fake"

    def apply_chat_template(self, messages: list[dict[str, str]], **_: Any) -> str:
        return "|".join(f"{m['role']}:{m['content']}" for m in messages)

    def __call__(self, text: str, **_: Any) -> dict[str, list[int]]:
        return {"input_ids": [ord(c) for c in text]}


class FakeLLM:
    """Streams an answer in two pieces."""

    def __init__(self) -> None:
        self.tokenizer = FakeTokenizer()
        self.chat_reader = chat_reader(self.tokenizer)
        self.device = "cpu"
        self.asked: list[str] = []
        self.closed = 0
        self.interrupt = self.reasons = False
        self.default_sampling: dict[str, Any] = {}
        self.params: list[SamplingParams] = []

    def get_default_sampling_params(self) -> SamplingParams:
        return SamplingParams(**self.default_sampling)

    def stream_message(self, messages: Any, params: Any) -> Iterator[Delta]:
        text = "".join(chr(i) for i in chat_reader(self.tokenizer).read(messages).token_ids)
        if "too long" in text:
            raise InvalidInputError("prompt", "9000 tokens", "must be at most 8191 tokens")
        self.asked.append(text)
        self.params.append(params)
        try:
            if self.interrupt:
                os.kill(os.getpid(), signal.SIGINT)
            if self.reasons:
                yield ReasoningDelta("hm, ")
                yield ReasoningDelta("so")
            yield ContentDelta("very ")
            yield ContentDelta("well")
        finally:
            self.closed += 1


@pytest.fixture
def llm(monkeypatch: pytest.MonkeyPatch) -> FakeLLM:
    fake = FakeLLM()
    start_with(monkeypatch, lambda model, **arguments: fake)
    return fake


def call(*arguments: str, typed: str | bytes | None = None) -> Result:
    return CliRunner().invoke(app, list(arguments), input=typed, env={"COLUMNS": "100"})


def test_chat_remembers_resets_and_leaves(llm: FakeLLM) -> None:
    typed = "hi\nagain\n/reset\n\nnew\n/what\n/exit\nnever\n"
    result = call("chat", "-m", "x", "--system", "be kind", typed=typed)
    assert result.exit_code == 0, result.output
    assert result.stdout == "very well\n" * 3
    assert llm.asked == [
        "system:be kind|user:hi",
        "system:be kind|user:hi|assistant:very well|user:again",
        "system:be kind|user:new",
    ]
    assert "unknown command /what" in result.stderr


def test_chat_shows_reasoning_apart(llm: FakeLLM) -> None:
    llm.reasons = True
    result = CliRunner().invoke(app, ["chat", "-m", "x"], input="hi\nmore\n/exit\n", color=True)
    assert result.exit_code == 0, result.output
    dim = "".join(f"\x1b[2m{text}\x1b[0m" for text in ("hm, ", "so"))
    assert result.stdout == f"{dim}\n\nvery well\n" * 2
    assert llm.asked[1] == "user:hi|assistant:very well|user:more"


def test_chat_takes_what_the_model_asks_for(llm: FakeLLM) -> None:
    llm.default_sampling = {"temperature": 0.3, "top_p": 0.9}
    assert call("chat", "-m", "x", "--top-p", "0.5", typed="hi\n").exit_code == 0
    [params] = llm.params
    assert (params.temperature, params.top_p, params.max_tokens) == (0.3, 0.5, 256)


def test_chat_ends_with_its_input(llm: FakeLLM) -> None:
    assert call("chat", "-m", "x", typed="").exit_code == 0


def test_chat_ctrl_c_stops_the_answer_only(llm: FakeLLM) -> None:
    llm.interrupt = True
    result = call("chat", "-m", "x", typed="hi\nagain\n")
    assert result.exit_code == 0, result.output
    assert result.stdout.splitlines()[:2] == ["very ", "very "]
    assert llm.asked[1] == "user:hi|assistant:very |user:again"
    assert llm.closed == 2


def test_a_second_ctrl_c_interrupts() -> None:
    before = signal.getsignal(signal.SIGINT)  # ignored, where a shell started this behind it
    with ctrl_c_sets() as stop:
        os.kill(os.getpid(), signal.SIGINT)
        assert stop.is_set
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is before


def test_chat_refuses_one_question_and_goes_on(llm: FakeLLM) -> None:
    result = call("chat", "-m", "x", typed="too long\nhi\n")
    assert result.exit_code == 0
    assert "refused: " in result.stderr
    assert llm.asked == ["user:hi"]


@pytest.mark.parametrize("line", [b"\xff", b"wrong \xc3"])
def test_chat_drops_a_line_that_is_no_text_and_goes_on(llm: FakeLLM, line: bytes) -> None:
    result = call("chat", "-m", "x", typed=line + b"\r\nhi\r\nbye")
    assert result.exit_code == 0, result.output
    assert "refused: the line is not utf-8 text" in result.stderr
    assert [asked.split("user:")[-1] for asked in llm.asked] == ["hi", "bye"]


def test_chat_refuses_lone_surrogates(llm: FakeLLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """A terminal gives them under a locale without UTF-8."""
    lines = iter(["\ud800", "hi", "/exit"])
    monkeypatch.setattr(chat, "_read", lambda: next(lines))
    result = call("chat", "-m", "x")
    assert "refused: message" in result.stderr
    assert llm.asked == ["user:hi"]
    result = call("chat", "-m", "x", "--system", "\ud800")
    assert result.exit_code == 2
    assert "--system" in result.stderr


def test_chat_without_a_template_is_refused(llm: FakeLLM) -> None:
    llm.tokenizer.chat_template = None
    result = call("chat", "-m", "x", typed="hi\n")
    assert result.exit_code == 2
    assert "no chat template" in result.stderr
