"""Test the installed wheel from outside the repository: `python try_wheel.py REPOSITORY`.

`nox -s wheel` runs it with the Python that has the wheel installed; torch is not needed. Every
source file must be installed, and the command line must work. A trace that the engine writes must
pass `pagespec trace check` and be drawn by `pagespec trace view`; so the wheel must contain the
specification and the viewer's page.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

import pagespec
from pagespec import SamplingParams
from pagespec.engine.block_manager import BlockManager
from pagespec.engine.core import Engine
from pagespec.engine.plan import StepPlan, StepResult
from pagespec.engine.request import Request
from pagespec.engine.scheduler import Scheduler


class FixedRunner:
    """Samples token 1 for every plan."""

    pipeline_depth = 0

    def dispatch(self, plan: StepPlan) -> int:
        return plan.num_sampled

    def collect(self, handle: object) -> StepResult:
        assert isinstance(handle, int)
        return StepResult([1] * handle)

    def reset(self) -> None:
        pass


def missing_files(repository: Path, installed: Path) -> list[str]:
    names = []
    for source, target in (("src", installed), ("spec", installed / "spec")):
        for path in sorted((repository / source).rglob("*")):
            name = path.relative_to(repository / source)
            is_code = path.suffix in (".py", ".css", ".html", ".js") or path.name == "py.typed"
            if is_code and not (target / name).exists():
                names.append(f"{source}/{name}")
    return names


def write_trace(path: Path) -> None:
    scheduler = Scheduler(BlockManager(4, 2), max_num_seqs=2, max_num_batched_tokens=4)
    engine = Engine(scheduler, FixedRunner(), trace=path)
    for name in "abc":
        engine.add(Request(name, [1, 2, 3], SamplingParams(), max_num_tokens=8))
    while engine.has_work:
        engine.step()


def command(*arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "pagespec.cli", *arguments],
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        sys.exit(f"pagespec {' '.join(arguments)}: exit code {done.returncode}\n{done.stderr}")
    return done.stdout


def main() -> None:
    repository = Path(sys.argv[1]).resolve()
    installed = Path(pagespec.__file__).resolve().parent
    if installed == repository / "src":
        sys.exit(f"{installed} is the source, not the wheel")
    if missing := missing_files(repository, installed):
        sys.exit(f"not in the wheel (see `packages` in pyproject.toml): {', '.join(missing)}")
    assert "generate" in command("--help")
    with tempfile.TemporaryDirectory() as folder:
        trace = Path(folder) / "trace.jsonl"
        write_trace(trace)
        verdict = command("trace", "check", str(trace))
        page = Path(command("trace", "view", str(trace)).strip())
        assert page.read_text().startswith("<!doctype html>"), page
    assert verdict.startswith("accepted: "), verdict
    print(f"{installed}: all files are there; trace check: {verdict}", end="")


if __name__ == "__main__":
    main()
