"""A fake engine that answers in upper case, and a fixture that runs command lines on it."""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from pagespec.chat.reader import ChatReader
from pagespec.cli import make_llm
from pagespec.cli.main import app
from pagespec.engine.inputs import PromptInput, PromptReader
from pagespec.engine.outputs import CompletionOutput, RequestOutput
from pagespec.engine.sampling_params import SamplingParams
from pagespec.errors import InvalidInputError


class FakeTokenizer:
    chat_template = "fake"

    def get_chat_template(self, chat_template: str | None = None, _tools: Any = None) -> str:
        return chat_template or self.chat_template

    def apply_chat_template(self, messages: list[dict[str, str]], **_: Any) -> str:
        if any(m["role"] not in {"system", "user", "assistant"} for m in messages):
            raise RuntimeError("no such role")
        return "".join(f"[{m['role']}]{m['content']}" for m in messages)

    def __call__(self, text: str, **_: Any) -> dict[str, list[int]]:
        return {"input_ids": [ord(c) for c in text]}


def chat_reader(tokenizer: Any) -> ChatReader:
    return ChatReader(prompt_reader(tokenizer), tokenizer)


def prompt_reader(tokenizer: Any) -> PromptReader:
    return PromptReader(tokenizer, 1 << 21, 1000)


class FakeLLM:
    """Reads ``window`` requests ahead, as the engine does; results may arrive out of order."""

    window = 3

    def __init__(self, tokenizer: Any = None) -> None:
        self.tokenizer = tokenizer
        self.stop_after: int | None = None  # requests until a Ctrl-C
        self.default_sampling: dict[str, Any] = {}
        self.chat_reader = chat_reader(tokenizer)
        self.read_messages = self.chat_reader.read
        self.reader = prompt_reader(tokenizer)
        self.seen: list[tuple[Any, Any]] = []

    def get_default_sampling_params(self) -> SamplingParams:
        return SamplingParams(**self.default_sampling)

    def generate_iter(
        self,
        requests: Iterable[tuple[Any, Any] | InvalidInputError],
        *,
        window: int | None = None,
    ) -> Iterator[RequestOutput | Exception]:
        source = iter(requests)
        ahead: deque[tuple[Any, Any] | InvalidInputError] = deque()
        while True:
            while len(ahead) < (window or self.window) and (item := next(source, None)):
                ahead.append(item)
            if not ahead:
                return
            item = ahead.popleft()
            if isinstance(item, InvalidInputError):
                yield item
                continue
            prompt, params = item
            if self.stop_after is not None and len(self.seen) == self.stop_after:
                raise KeyboardInterrupt
            self.seen.append((prompt, params))
            yield self._answer(prompt, params)

    def _answer(self, prompt: Any, params: Any) -> RequestOutput | Exception:
        text: str | None
        if isinstance(prompt, PromptInput):
            text, ids = prompt.text, prompt.token_ids
        else:
            text = prompt.get("prompt") if isinstance(prompt, dict) else prompt
            ids = prompt["prompt_token_ids"] if text is None else [ord(c) for c in text]
        if not ids:
            return InvalidInputError("prompt", text, "must not be empty")
        answer = "".join(chr(i) for i in ids).upper()[: params.max_tokens]
        outputs = [
            CompletionOutput(i, answer + "!" * i, [ord(c) for c in answer], finish_reason="stop")
            for i in range(params.n)
        ]
        return RequestOutput("r", text, ids, None, outputs)


def start_with(monkeypatch: pytest.MonkeyPatch, make: Callable[..., Any]) -> None:
    """Commands create their engines with ``make(model, **arguments)``."""
    monkeypatch.setattr(make_llm, "make_llm", make)


class Desk:
    """Runs commands one after another in one folder, each with a new fake engine."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.source = folder / "in.jsonl"
        self.output = folder / "out.jsonl"
        self.llm = FakeLLM()
        self.started: list[tuple[str, dict[str, Any]]] = []
        start_with(monkeypatch, self._make)

    def _make(self, model: str, **arguments: Any) -> FakeLLM:
        self.started.append((model, arguments))
        return self.llm

    def lines(self, *lines: Any) -> None:
        texts = [line if isinstance(line, str) else json.dumps(line) for line in lines]
        self.source.write_text("".join(text + "\n" for text in texts))

    def run(self, *options: str) -> Result:
        return call("generate", "-m", "tiny", *options)

    def run_file(self, *options: str) -> Result:
        last, self.llm = self.llm, FakeLLM(self.llm.tokenizer)
        self.llm.stop_after, self.llm.default_sampling = last.stop_after, last.default_sampling
        return self.run("--input", str(self.source), "--output", str(self.output), *options)

    def rows(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.output.read_text().splitlines()]


def call(*arguments: str) -> Result:
    return CliRunner().invoke(app, list(arguments))
