"""Run the kill suite against each named mutant: `python -m tests.mutants [name]`.

Each mutant is applied to a copy of the sources. The program prints the property that killed it and
exits with 1 if any mutant survives.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

from tests.mutants.catalog import MUTANTS, Mutant
from tests.mutants.syntax import PatchError, patch

ROOT = Path(__file__).parents[2]
TIMEOUT_S = 120
PACKAGES = ("engine", "runner", "structured")


def read_sources(package: Path) -> dict[Path, str]:
    """The text of every file of the packages that have mutants."""
    return {path: path.read_text() for name in PACKAGES for path in (package / name).rglob("*.py")}


def mutate(mutant: Mutant, sources: Mapping[Path, str]) -> tuple[Path, str]:
    """The changed file of a mutant. Raises SystemExit if the patch does not apply to the code."""
    try:
        return patch(sources, mutant.where, mutant.old, mutant.new)
    except PatchError as error:
        raise SystemExit(f"mutant {mutant.name!r}: {error}; update the catalog") from error


@contextmanager
def mutated_sources(mutant: Mutant | None) -> Iterator[dict[str, str]]:
    """Environment variables under which `import pagespec` finds a copy with the mutant in it."""
    with tempfile.TemporaryDirectory() as folder:
        package = Path(folder) / "pagespec"
        shutil.copytree(ROOT / "src", package, ignore=shutil.ignore_patterns("__pycache__"))
        if mutant is not None:
            path, text = mutate(mutant, read_sources(package))
            path.write_text(text)
        yield {"PYTHONPATH": f"{folder}{os.pathsep}{ROOT}"}


def kill(mutant: Mutant | None) -> tuple[str, float]:
    """The kill suite's verdict on a mutant ("" if it survives), and the seconds that it took. None
    is the unchanged code, which must survive."""
    with mutated_sources(mutant) as environment:
        begin = time.perf_counter()
        try:
            done = subprocess.run(
                [sys.executable, "-m", "tests.mutants.kill"],
                cwd=ROOT,
                env={**os.environ, **environment},
                capture_output=True,
                text=True,
                timeout=TIMEOUT_S,
                check=False,
            )
        except subprocess.TimeoutExpired:
            return "KILLED L1: the suite never ended", TIMEOUT_S
        seconds = time.perf_counter() - begin
        if done.returncode == 0:
            return "", seconds
        lines = [line for line in done.stdout.splitlines() if line.startswith("KILLED")]
        return (lines or ["KILLED at import: " + done.stderr.strip()[-120:]])[0], seconds


def main() -> int:
    wanted = " ".join(sys.argv[1:])
    mutants = [m for m in MUTANTS if wanted in m.name]
    verdict, seconds = kill(None)
    if verdict:
        print(f"the unchanged code does not survive: {verdict}")
        return 1
    print(f"unchanged code: survives, {seconds:.1f} s\n\nrow  killed by  seconds  mutant: detail")
    num_alive = 0
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        for mutant, (verdict, seconds) in zip(mutants, pool.map(kill, mutants), strict=True):
            killer, _, detail = verdict.removeprefix("KILLED ").partition(": ")
            num_alive += not verdict
            print(
                f"{mutant.row:>3}  {killer or 'SURVIVED':<9}  {seconds:>7.1f}  {mutant.name}: "
                f"{detail[:110]}",
                flush=True,
            )
    rows = {m.row for m in mutants}
    print(f"\n{len(mutants)} mutants of {len(rows)} rows, {num_alive} survived")
    return 1 if num_alive else 0


if __name__ == "__main__":
    sys.exit(main())
