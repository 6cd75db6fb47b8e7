"""Runs blocks, page by page, in a temporary folder that looks like the root of the repository."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

from pagespec import embedded_model_path

from .blocks import ROOT, Block
from .check import commands_of, is_install

START_S = 120.0
_STOP_S = 30.0
# The pages assume a file of prompts, and `model.gguf`.
_FILES = {
    "prompts.jsonl": "".join(
        json.dumps({"prompt": text, "max_tokens": 8, "temperature": 0}) + "\n"
        for text in ("The capital of France is", "Water boils at")
    )
}
# Runs programs in one process and one namespace, and writes the seconds of each that ended.
_DRIVER = """
import json, sys, time
programs = json.load(open(sys.argv[1]))
names = {"__name__": "__main__"}
for text, line, place in programs:
    began = time.perf_counter()
    exec(compile("\\n" * (line - 1) + text, place, "exec"), names)
    with open(sys.argv[2], "a") as file:
        print(time.perf_counter() - began, file=file)
"""


@dataclass(frozen=True)
class Result:
    """The status of a block and what belongs to it.

    Attributes:
        status: "run", "skipped" or "failed".
        detail: seconds, a reason, or the end of the output.
    """

    block: Block
    status: str
    detail: str


def run_all(blocks: Sequence[Block], timeout_s: float, slow: bool = False) -> Iterator[Result]:
    """Run the blocks in their order.

    Args:
        timeout_s: for each block.
        slow: also run blocks that need only time.
    """
    for _, of_page in groupby(blocks, lambda block: block.file):
        with _page_folder() as folder, contextlib.ExitStack() as servers:
            page = _Page(folder, servers, timeout_s, slow)
            yield from page.run(list(of_page))


class _Page:
    """Runs the blocks of one page, which share a folder, a server and Python names."""

    def __init__(
        self, folder: Path, servers: contextlib.ExitStack, timeout_s: float, slow: bool
    ) -> None:
        self._folder, self._servers = folder, servers
        self._timeout_s, self._slow = timeout_s, slow

    def run(self, blocks: Sequence[Block]) -> Iterator[Result]:
        todo = list(blocks)
        while todo:
            block = todo.pop(0)
            reason = self._skipped(block)
            if block.language == "python":
                # Its continuations run in the same process.
                group = [block]
                while todo and todo[0].continues and todo[0].language == "python":
                    group.append(todo.pop(0))
                if reason:
                    yield from (Result(one, "skipped", reason) for one in group)
                    continue
                # A continuation that is skipped leaves the rest of the group without its names.
                known = [self._skipped(one) for one in group]
                num_run = next((i for i, one in enumerate(known) if one), len(group))
                yield from self._run_python(group[:num_run])
                yield from (Result(one, "skipped", known[num_run]) for one in group[num_run:])
            elif reason:
                yield Result(block, "skipped", reason)
            elif block.server is not None:
                yield self._start(block)
            else:
                yield self._run_bash(block)

    def _skipped(self, block: Block) -> str:
        """The reason why a block is not run; empty for one that is."""
        if block.fragment:
            return f"fragment: {block.fragment}"
        needs = [need for need in block.needs if not (self._slow and need.startswith("time"))]
        if needs:
            return f"needs {', '.join(needs)}"
        if block.language == "bash":
            lines = [line for line in _lines(block) if not is_install(line)]
            if not lines:
                return "install"
            if all(_is_of_ci(line) for line in lines):
                return "a session of CI"
        return ""

    def _environment(self) -> dict[str, str]:
        environment = dict(os.environ)
        environment["PATH"] = f"{self._folder / 'bin'}{os.pathsep}{environment['PATH']}"
        environment |= {"HF_HUB_OFFLINE": "1", "NO_COLOR": "1", "COLUMNS": "100"}
        return environment

    def _process(self, arguments: Sequence[str], output: Path) -> subprocess.Popen[bytes]:
        with output.open("wb") as file:
            return subprocess.Popen(
                arguments,
                cwd=self._folder / "root",
                env=self._environment(),
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def _finish(self, arguments: Sequence[str], timeout_s: float) -> str:
        """Run a process to its end; returns why it failed, or an empty text."""
        output = self._folder / "output"
        process = self._process(arguments, output)
        try:
            code = process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return f"took longer than {timeout_s:g} s: {_tail(output)}"
        finally:
            _stop(process)
        return f"exit code {code}: {_tail(output)}" if code else ""

    def _limit(self, block: Block) -> float:
        minutes = [int(need.split()[1]) for need in block.needs if need.startswith("time")]
        return max([self._timeout_s, *(120.0 * one for one in minutes)])

    def _script(self, block: Block) -> str:
        lines = block.text.replace("\\\n", "\\\0").splitlines()
        kept = [line for line in lines if not (is_install(line) or _is_of_ci(line))]
        return "\n".join(kept).replace("\0", "\n")

    def _run_bash(self, block: Block) -> Result:
        began = time.perf_counter()
        script = ["bash", "-e", "-o", "pipefail", "-c", self._script(block)]
        failure = self._finish(script, self._limit(block))
        taken = f"{time.perf_counter() - began:.1f} s"
        return Result(block, "failed", failure) if failure else Result(block, "run", taken)

    def _run_python(self, group: Sequence[Block]) -> Iterator[Result]:
        programs, times = self._folder / "programs.json", self._folder / "times"
        shown = [(one.text, one.line, one.file) for one in group]
        programs.write_text(json.dumps(shown))
        times.write_text("")
        arguments = [sys.executable, "-c", _DRIVER, str(programs), str(times)]
        failure = self._finish(arguments, sum(map(self._limit, group)))
        taken = times.read_text().split()
        for i, block in enumerate(group):
            if i < len(taken):
                yield Result(block, "run", f"{float(taken[i]):.1f} s")
            else:
                yield Result(block, "failed", failure or "an earlier block failed")

    def _start(self, block: Block) -> Result:
        """Start a server, which stops behind the last block of the page."""
        assert block.server is not None
        if _is_open(block.server):
            return Result(block, "failed", f"port {block.server} is in use by another process")
        began = time.perf_counter()
        output = self._folder / f"server-{block.server}"
        process = self._process(["bash", "-e", "-c", self._script(block)], output)
        self._servers.callback(_stop, process)
        while not _is_open(block.server):
            if process.poll() is not None:
                return Result(block, "failed", f"the server ended: {_tail(output)}")
            if time.perf_counter() - began > START_S:
                return Result(block, "failed", f"no server at {block.server}: {_tail(output)}")
            time.sleep(0.1)
        return Result(block, "run", f"{time.perf_counter() - began:.1f} s")


@contextlib.contextmanager
def _page_folder() -> Iterator[Path]:
    """A folder with ``root``, which links to what the repository has, and ``bin``."""
    with tempfile.TemporaryDirectory(prefix="doc-commands-") as name:
        folder = Path(name)
        for part in ("root", "bin"):
            (folder / part).mkdir()
        for path in ROOT.iterdir():
            if not path.name.startswith(".") and path.name not in ("build", "dist", "site"):
                (folder / "root" / path.name).symlink_to(path)
        if (model := embedded_model_path()) is not None:
            (folder / "root" / "model.gguf").symlink_to(model)
        for file, text in _FILES.items():
            (folder / "root" / file).write_text(text)
        # The interpreter in use, also for scripts of the package.
        for command, arguments in (
            ("python", ""),
            ("python3", ""),
            ("pagespec", "-m pagespec.cli"),
        ):
            script = folder / "bin" / command
            script.write_text(f'#!/bin/sh\nexec "{sys.executable}" {arguments} "$@"\n')
            script.chmod(0o755)
        yield folder


def _lines(block: Block) -> list[str]:
    """Lines of a shell block, those that go on joined, without comments."""
    lines = block.text.replace("\\\n", " ").splitlines()
    return [line for line in lines if line.strip() and not line.strip().startswith("#")]


def _is_of_ci(line: str) -> bool:
    """Whether a line runs sessions of nox, which CI runs by itself."""
    found = list(commands_of(line))
    return any(words[0].rpartition("/")[2] == "nox" or words[0] == ".ci/run" for words in found)


def _is_open(port: int) -> bool:
    with socket.socket() as probe:
        probe.settimeout(1.0)
        return probe.connect_ex(("127.0.0.1", port)) == 0


def _stop(process: subprocess.Popen[bytes]) -> None:
    """End a process and all that it started."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_STOP_S)
            return


def _tail(output: Path) -> str:
    lines = output.read_text(errors="replace").strip().splitlines()
    return " | ".join(line.strip() for line in lines[-6:])
