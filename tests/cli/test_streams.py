"""The command line as a process whose streams are closed, full, or have a limited encoding."""

from __future__ import annotations

import os
import subprocess
import sys
from contextlib import redirect_stderr
from pathlib import Path

import pytest

# The commands on a fake engine; ``main`` is what the script runs.
PROGRAM = """
from pagespec.chat.deltas import ContentDelta
from pagespec.cli import make_llm as start
from tests.support.cli_fakes import FakeLLM, FakeTokenizer

class Talking(FakeLLM):
    def stream_message(self, messages, params):
        yield from map(ContentDelta, ("very ", "w\\u00e9ll \\U0001f600"))

def make_llm(model, **_):
    open("loaded", "w").close()
    return Talking(FakeTokenizer())

start.make_llm = make_llm
try:
    from pagespec.cli.main import main
except ImportError:
    from pagespec.cli.main import app as main
main()
"""
ROOT = Path(__file__).parents[2]
ASK = "generate -m x --raw -p hi"
FILE = "generate -m x -i in.jsonl -o out.jsonl"
TALK = "chat -m x"


class Shell:
    """Runs ``pagespec`` lines in a folder that has an input file."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (folder / "in.jsonl").write_text('{"prompt": "a"}\n')
        (folder / "program.py").write_text(PROGRAM)
        os.mkfifo(folder / "fifo")

    def __call__(self, line: str, **environment: str) -> subprocess.CompletedProcess[str]:
        """``pagespec`` in ``line`` is the program; its exit code is the shell's."""
        program = f"{sys.executable} program.py"
        path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
        return subprocess.run(
            ["bash", "-c", f"set -o pipefail; {line.replace('pagespec', program)}"],
            cwd=self.folder,
            env={**os.environ, "PYTHONPATH": path, **environment},
            capture_output=True,
            encoding="utf-8",
            errors="replace",
            timeout=60,
            check=False,
        )


@pytest.fixture
def shell(tmp_path: Path) -> Shell:
    return Shell(tmp_path)


@pytest.mark.parametrize("closed", ["<&-", ">&-", "2>&-", "<&- >&- 2>&-"])
@pytest.mark.parametrize("line", [ASK, FILE, TALK])
def test_a_closed_stream_is_as_the_null_device(shell: Shell, line: str, closed: str) -> None:
    result = shell(f"pagespec {line} <<< hi {closed}")
    assert (result.returncode, "Traceback" in result.stderr) == (0, False), result.stderr
    if line == FILE:
        assert (shell.folder / "out.jsonl").read_text().count('"text": "A"') == 1
    elif ">&-" not in closed.split():
        assert result.stdout.rstrip() in ("HI", "very wéll 😀", "")


@pytest.mark.parametrize("encoding", ["latin-1", "ascii", "cp1252:strict"])
@pytest.mark.parametrize("line", ["generate -m x --raw -p 😀é", f"{TALK} <<< hi", "--help"])
def test_what_an_encoding_lacks_is_escaped(shell: Shell, line: str, encoding: str) -> None:
    result = shell(f"pagespec {line}", PYTHONIOENCODING=encoding)
    assert (result.returncode, "Traceback" in result.stderr) == (0, False), result.stderr
    # Of ASCII, which is mostly a mistake, typer makes UTF-8.
    shown = "😀" if encoding == "ascii" else "\\U0001f600"
    assert "help" in line or shown in result.stdout


@pytest.mark.parametrize("line", [ASK, f"{TALK} <<< hi", "--help", "version", "generate --help"])
def test_a_full_disk_is_one_line(shell: Shell, line: str) -> None:
    result = shell(f"pagespec {line} > /dev/full")
    assert result.returncode == 2
    assert "Traceback" not in result.stderr
    assert result.stderr.splitlines()[-1].startswith("pagespec: error: [Errno 28] No space left")


@pytest.mark.parametrize("line", [ASK, f"{TALK} <<< hi", FILE])
def test_answers_do_not_need_a_stderr(shell: Shell, line: str) -> None:
    assert shell(f"pagespec {line} 2> /dev/full").returncode == 0


@pytest.mark.parametrize("line", [f"{ASK} -p ho", TALK, "--help", "version"])
def test_a_reader_that_leaves_ends_the_command_quietly(shell: Shell, line: str) -> None:
    result = shell(f"yes hi | head -n 9000 | (pagespec {line}; echo $? >&2) | true")
    assert result.stderr.splitlines()[-1] in ("0", "1")
    assert "Traceback" not in result.stderr
    assert "Exception ignored" not in result.stderr


@pytest.mark.parametrize("output", ["/dev/null", "/dev/full", "/dev/zero", "fifo", "."])
def test_an_output_that_is_no_file_is_refused_before_the_model_is_loaded(
    shell: Shell, output: str
) -> None:
    for more in ("", " --overwrite"):
        result = shell(f"pagespec generate -m x -i in.jsonl -o {output}{more}")
        assert result.returncode == 2
        assert result.stderr.startswith(f"pagespec: error: --output = '{output}': must be a file")
        assert len(result.stderr.splitlines()) == 1
        assert not (shell.folder / "loaded").exists()


@pytest.mark.parametrize("source", ["/dev/null", "fifo", "."])
def test_an_input_that_is_no_file_is_refused(shell: Shell, source: str) -> None:
    result = shell(f"pagespec generate -m x -i {source} -o out.jsonl")
    assert result.returncode == 2
    assert result.stderr.startswith(f"pagespec: error: --input = '{source}': must be a file")


def test_a_progress_bar_needs_no_stderr() -> None:
    """There is none under pythonw."""
    from pagespec.engine.inputs import PromptInput
    from tests.engine.test_generation import FALLBACK, PROMPT, SamplingParams, Terminal, serving_of

    serving = serving_of(FALLBACK, [100])
    params = SamplingParams(max_tokens=1)
    with redirect_stderr(None):
        [output] = serving.run([PromptInput(None, list(PROMPT))], [params], use_tqdm=True)
    assert output.outputs[0].token_ids == [100]
    with redirect_stderr(Terminal()) as shown:
        serving.run([PromptInput(None, list(PROMPT))], [params], use_tqdm=True)
    assert "1/1" in shown.getvalue()
