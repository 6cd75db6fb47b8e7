"""`python -m tests.coverage [names]`: compares every entry of transformers' mapping of causal
language models (or the named ones) with `generate`. `--json FILE` saves the results. `--write`
rewrites docs/models.md, and `--beside FILE` adds the differences from a saved sweep.

Exits with 1 if any entry is wrong or failed."""

from __future__ import annotations

import argparse
import os
import sys
from collections import Counter
from pathlib import Path

import torch

from tests.coverage.page import PAGE, page_of
from tests.coverage.sweep import ENTRIES, Sweep


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--json", type=Path)
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--beside", type=Path)
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1)
    parser.add_argument("names", nargs="*", default=ENTRIES)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    sweep = Sweep.now(arguments.processes)
    for entry in sweep.run(arguments.names):
        of_all = f"{len(sweep.entries)}/{len(arguments.names)}"
        print(
            f"{of_all:>8} {entry.model_type:<26} {entry.outcome:<10} {entry.seconds:6.1f} s  "
            f"{entry.reason or entry.notes}",
            flush=True,
        )
    if arguments.json:
        sweep.save(arguments.json)
    if arguments.write:
        beside = Sweep.load(arguments.beside) if arguments.beside else None
        PAGE.write_text(page_of(sweep, beside))
    counts = Counter(entry.outcome for entry in sweep.entries)
    print(f"{', '.join(f'{n} {name}' for name, n in sorted(counts.items()))}")
    print(f"{sweep.seconds:.0f} s in {sweep.num_processes} processes")
    return 1 if counts.keys() & {"wrong", "failed"} else 0


if __name__ == "__main__":
    sys.exit(main())
