"""``python -m tests.peer``: run vLLM's tests and examples, and compare with ``expected.md``.

Without paths: all of ``files.OFFLINE`` and ``files.HTTP``, and the examples.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from . import examples, expected, files, reasons, run, sources, static

TABLE = Path(__file__).with_name("expected.md")
_TITLE = f"vLLM {sources.VERSION}'s tests and examples against pagespec"
_MORE = """Written by `python -m tests.peer --write`, compared by `nox -s peer_tests`. Each
text-generation model stands for SmolLM2-135M-Instruct in float32 on a CPU, whose template here
also shows tools. Base models, and all models of tests that read no answer (`TINY` in `files.py`),
stand for a random Llama of two layers.

Tests are counted by pytest's ids, parameters included; a test whose parameters differ only in the
replaced model counts once. A file that imports only names that pagespec does not have, and starts
no server, is not started, and its tests are counted by functions. Not run here: the test skips
itself, or this machine lacks what it needs.

Some arguments were left out. pagespec refuses them, or they choose kernels and steps of vLLM:

{left_out}

Files that did not run when this table was written:

{absent}"""


def listed(names: Iterable[str]) -> str:
    """A list in Markdown; "- none" if there are no names."""
    return "\n".join(f"- `{name}`" for name in names) or "- none"


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns: 0, or 1 if the run differs from the table."""
    parser = argparse.ArgumentParser(prog="python -m tests.peer", description=__doc__)
    parser.add_argument("paths", nargs="*", help="test files, folders or examples of vLLM")
    parser.add_argument("--quick", action="store_true", help="three files and one example")
    parser.add_argument("--write", action="store_true", help="write the table anew")
    parser.add_argument("--from-records", action="store_true", help="run nothing: the last records")
    parser.add_argument("--jobs", type=int, default=2, help="processes at a time (2)")
    given = parser.parse_args(arguments)

    cache = sources.cache_folder()
    stage, records = sources.stage(cache), cache / "records"
    sources.model_folder(cache)
    records.mkdir(exist_ok=True)
    all_paths = (*files.OFFLINE, *files.HTTP, *examples.OFFLINE)
    chosen = tuple(given.paths) or (files.QUICK if given.quick else all_paths)
    names = files.test_files(stage, chosen)

    for stop in (signal.SIGINT, signal.SIGTERM):
        signal.signal(stop, lambda number, _: (run.end_all(), os._exit(128 + number)))

    def results_of(name: str) -> list[expected.Result]:
        unapplied = None if name.startswith("examples/") else static.unapplied(stage, name)
        if unapplied:
            return [unapplied]
        if given.from_records:
            entries = run.read_record(run.record_of(records, name))
        elif name.startswith("examples/"):
            entries = examples.run_example(stage, name, records)
        else:
            entries = run.run_file(stage, name, records)
        found = [reasons.result_of(entry) for entry in entries]
        counts = [sum(each.outcome == one for each in found) for one in expected.OUTCOMES]
        words = ", ".join(
            f"{n} {one}" for n, one in zip(counts, expected.OUTCOMES, strict=True) if n
        )
        seconds = sum(each.seconds for each in found)
        print(f"{name}: {words or 'no tests'} ({seconds:.0f} s)", flush=True)
        return found

    with ThreadPoolExecutor(given.jobs) as pool:
        results = [one for found in pool.map(results_of, names) for one in found]
    left_out = run.left_out(records, names)
    if left_out:
        print("arguments that were refused, and left out:", ", ".join(left_out))
    if given.write:
        if chosen != all_paths:
            parser.error("--write needs a run of all files: give no paths and no --quick")
        files_run = {one.file for one in results}
        absent = [name for name in names if name not in files_run]
        more = _MORE.format(left_out=listed(left_out), absent=listed(absent))
        TABLE.write_text(expected.render(results, _TITLE, more), encoding="utf-8")
        return 0
    text = TABLE.read_text(encoding="utf-8") if TABLE.exists() else ""
    differences = expected.compare(results, expected.parse(text))
    for line in differences:
        print(line)
    print(f"{len(results)} tests, {len(differences)} differences from {TABLE.name}")
    return bool(differences)


if __name__ == "__main__":
    sys.exit(main())
