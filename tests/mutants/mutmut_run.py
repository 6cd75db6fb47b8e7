"""Run mutmut's mutants of the block manager and the scheduler.

    python -m tests.mutants.mutmut_run [--children 2] [--no-long] [pattern of mutant names ...]

mutmut changes one operator, constant or argument at a time, in every line. (The named mutants of
`catalog.py` are known bugs instead.) Each mutant first runs against the unit tests and
`test_kill_quick.py`. Survivors run against the long suite (`--long`): `kill.py`, more walks and the
property tests. Prints the score and the diff of each survivor. Exits with 1 if a survivor is not in
the table of `MUTMUT.md`.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import shutil
import subprocess
import sys
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.mutants import kill

ROOT = Path(__file__).parents[2]
HOME = ROOT / "build" / "mutmut"
TABLE = ROOT / "tests" / "mutants" / "MUTMUT.md"
MODULES = ("block_manager", "ledger", "scheduler", "queues", "planner", "policy")
MUTMUT = (sys.executable, "-c", "from mutmut.__main__ import cli; cli()")
LONG_SUITE = (sys.executable, "-m", "tests.mutants.mutmut_run", "--long-suite")

NUM_MORE_WALKS = 300
LONG_TIMEOUT_S = 600
MEMORY_LIMIT = 6 << 30
"""A mutant that never ends may also never stop allocating."""

# mutmut takes a module's name from its path, and here the folder `src` is the package `pagespec`:
# it runs in a copy whose folder has the package's name. `timeout` is pytest-timeout's, a test;
# `timeout_multiplier` is mutmut's own, a net below it.
CONFIG = """
[tool.mutmut]
source_paths = ["pagespec"]
only_mutate = [{modules}]
also_copy = ["spec"]
pytest_add_cli_args_test_selection = [
    {tests}, "tests/mutants/test_kill_quick.py"
]
pytest_add_cli_args = ["-p", "no:cacheprovider"]
timeout_multiplier = 10.0
use_git_change_detection = false

[tool.pytest.ini_options]
addopts = "--import-mode=importlib"
pythonpath = ["."]
timeout = 5
"""

KILLED = {1: "killed", 3: "killed"}
SURVIVED = {0: "survived", 5: "no tests", 33: "no tests"}


class Mutant(NamedTuple):
    name: str
    status: str

    @property
    def module(self) -> str:
        return self.name.rpartition(".")[0].rpartition(".")[2]

    @property
    def function(self) -> str:
        mangled = self.name.rpartition(".")[2].partition("__mutmut_")[0]
        return mangled.rpartition("ǁ")[2] if "ǁ" in mangled else mangled.removeprefix("x_")


def lay_out() -> None:
    """Copy the package, the tests and the specification to a new folder, with mutmut's settings."""
    shutil.rmtree(HOME, ignore_errors=True)
    ignore = shutil.ignore_patterns("__pycache__")
    for source, target in (("src", "pagespec"), ("tests", "tests"), ("spec", "spec")):
        shutil.copytree(ROOT / source, HOME / target, ignore=ignore)
    modules = ", ".join(f'"pagespec/engine/{name}.py"' for name in MODULES)
    tests = ", ".join(f'"tests/engine/test_{name}.py"' for name in kill.UNIT_TESTS)
    (HOME / "pyproject.toml").write_text(CONFIG.format(modules=modules, tests=tests))


def results() -> list[Mutant]:
    """mutmut's verdicts; other outcomes than a failed test or a survival (a signal, a timeout) are
    exit codes."""
    mutants = []
    for name in MODULES:
        meta = HOME / "mutants" / "pagespec" / "engine" / f"{name}.py.meta"
        for mutant, code in json.loads(meta.read_text())["exit_code_by_key"].items():
            if code is not None:
                mutants.append(Mutant(mutant, (KILLED | SURVIVED).get(code, f"exit {code}")))
    return mutants


def survives_long_suite(mutant: Mutant) -> bool:
    """mutmut's trampolines run the mutant whose name is in the environment."""
    try:
        done = subprocess.run(
            LONG_SUITE,
            cwd=HOME / "mutants",
            env={**os.environ, "MUTANT_UNDER_TEST": mutant.name},
            capture_output=True,
            text=True,
            timeout=LONG_TIMEOUT_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        print(f"killed by the long suite: {mutant.name}: it never ended", flush=True)
        return False
    if done.returncode:
        reasons = [line for line in done.stdout.splitlines() if line.startswith("KILLED")]
        reason = (reasons or [(done.stdout + done.stderr)[-200:]])[0]
        print(f"killed by the long suite: {mutant.name}: {reason}", flush=True)
        return False
    # Said at once: the whole takes minutes, and a run that is stopped should not lose what it knew.
    print(f"survives the long suite: {mutant.name}", flush=True)
    return True


def run_long_suite() -> int:
    """Runs in the mutant's own process."""
    kill.NUM_WALKS += NUM_MORE_WALKS
    if kill.main():
        return 1
    first = kill.FirstFailure()
    arguments = ["-x", "-q", "-p", "no:cacheprovider", "-o", "timeout=300", "tests/property"]
    if pytest.main(arguments, plugins=[first]) != pytest.ExitCode.OK:
        print(f"KILLED property: {first.name}")
        return 1
    return 0


def change(mutant: Mutant) -> str:
    """The change on one line, as in the table of MUTMUT.md."""
    shown = subprocess.run(
        [*MUTMUT, "show", mutant.name], cwd=HOME, capture_output=True, text=True, check=True
    )
    lines = shown.stdout.splitlines()
    old, new = (
        " ".join(line[1:].strip() for line in lines if line[:1] == sign and line[:3] != sign * 3)
        for sign in "-+"
    )
    return f"`{old}` → `{new or '(removed)'}`".replace("|", r"\|")


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.mutants.mutmut_run")
    parser.add_argument("--children", type=int, default=2)
    parser.add_argument("--no-long", action="store_true", help="skip the long suite")
    parser.add_argument("--long-suite", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("patterns", nargs="*")
    arguments = parser.parse_args()
    if arguments.long_suite:
        return run_long_suite()

    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_LIMIT, MEMORY_LIMIT))
    lay_out()
    run = [*MUTMUT, "run", "--max-children", str(arguments.children), *arguments.patterns]
    subprocess.run(run, cwd=HOME, check=True)
    mutants = results()
    survivors = [m for m in mutants if m.status in SURVIVED.values()]
    print(f"\nafter the quick suite: {dict(Counter(m.status for m in mutants))}", flush=True)
    if not arguments.no_long:
        with ThreadPoolExecutor(arguments.children) as pool:
            verdicts = list(pool.map(survives_long_suite, survivors))
        survivors = [m for m, survives in zip(survivors, verdicts, strict=True) if survives]

    known = TABLE.read_text() if TABLE.exists() else ""
    num_unknown = 0
    print("\n| file | function | change |")
    for mutant in survivors:
        row = f"| {mutant.module} | {mutant.function} | {change(mutant)} |"
        is_known = row in known
        num_unknown += not is_known
        print(row, "" if is_known else f"NEW {mutant.name}")
    for name in MODULES:
        total = sum(m.module == name for m in mutants)
        alive = sum(m.module == name for m in survivors)
        print(f"{name:<14} {total:>4} mutants, {total - alive:>4} killed, {alive:>3} survived")
    num_killed = len(mutants) - len(survivors)
    score = 100 * num_killed / max(1, len(mutants))
    print(f"{'all':<14} {len(mutants):>4} mutants, {num_killed:>4} killed: {score:.1f} %")
    print(f"{len(survivors)} survived, {num_unknown} of them not in {TABLE.name}")
    return 1 if num_unknown else 0


if __name__ == "__main__":
    sys.exit(main())
