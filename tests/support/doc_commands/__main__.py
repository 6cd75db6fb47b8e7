import argparse
import signal
import sys
import time

from .blocks import ROOT, Block, blocks_of, deployed_commands, documents
from .check import faults
from .run import Result, run_all


def main() -> int:
    parser = argparse.ArgumentParser(description="Check and run the blocks of the documentation.")
    parser.add_argument("files", nargs="*", help="Markdown files by path; all of them by default")
    parser.add_argument("--check", action="store_true", help="run nothing")
    parser.add_argument("--slow", action="store_true", help="also blocks that need only time")
    parser.add_argument("--timeout", type=float, default=120.0, help="seconds for each block")
    parser.add_argument("--list", action="store_true", help="list the blocks and their markers")
    arguments = parser.parse_args()
    blocks: list[Block] = []
    for name in arguments.files or documents():
        blocks += blocks_of(name, (ROOT / name).read_text(encoding="utf-8"))
    if not arguments.files:
        blocks += deployed_commands()
    if arguments.list:
        for block in blocks:
            marks = [*block.needs, block.fragment and f"fragment: {block.fragment}"]
            marks += [block.server and f"server: {block.server}", block.continues and "continues"]
            print(f"{block.place:<34} {block.first_line[:60]:<60} {', '.join(filter(None, marks))}")
        return 0
    num_faults = 0
    right: list[Block] = []
    for block in blocks:
        found = list(faults(block))
        for fault in found:
            print(f"{block.place}: {fault}")
        num_faults += len(found)
        if not found:
            right.append(block)
    print(f"{len(blocks)} blocks, {num_faults} faults in syntax, markers, options or imports")
    if arguments.check:
        return bool(num_faults)
    began = time.perf_counter()
    results: list[Result] = []
    for result in run_all(right, arguments.timeout, arguments.slow):
        block = result.block
        detail = result.detail if result.status != "failed" else ""
        print(f"{block.place:<34} {block.first_line[:56]:<56} {result.status} {detail}", flush=True)
        if result.status == "failed":
            print(f"    {result.detail}", flush=True)
        results.append(result)
    counts = {s: sum(r.status == s for r in results) for s in ("run", "skipped", "failed")}
    shown = ", ".join(f"{count} {status}" for status, count in counts.items())
    print(f"{shown}, in {time.perf_counter() - began:.0f} s")
    return bool(counts["failed"] or num_faults)


if __name__ == "__main__":
    # So that servers end with this program.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    sys.exit(main())
