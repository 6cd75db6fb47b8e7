"""``python -m spec``: explores the scopes, or shows the counterexample of a seeded defect."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterable, Iterator
from multiprocessing import get_context

from .checker import ALL_PROPERTIES, Report, explore
from .defects import DEFECTS
from .scopes import GROUPS, SCOPES
from .state import Scope
from .trace import render

HEADER = (
    f"{'scope':20} {'states':>9} {'actions':>10} {'steps':>5} {'depth':>5} "
    f"{'seconds':>7} {'cpu':>6}  {'violated':8} happened"
)


def line(report: Report) -> str:
    """``steps``: longest shortest path. ``happened``: which events the dispatched plans had."""
    happened = " ".join(f"{name}:{count}" for name, count in sorted(report.seen.items()))
    violated = ",".join(report.violated) or ("none" if report.complete else "none yet")
    return (
        f"{report.scope.name:20} {report.states:9,} {report.transitions:10,} {report.depth:5} "
        f"{report.scope.depth:5} {report.seconds:7.1f} "
        f"{report.cpu_seconds:6.1f}  {violated:8} {happened}"
    )


def reports(scopes: Iterable[Scope], processes: int) -> Iterator[Report]:
    if processes == 1:
        yield from map(explore, scopes)
        return
    with get_context("spawn").Pool(processes, maxtasksperchild=1) as pool:
        yield from pool.imap_unordered(explore, scopes)


def show_counterexample(report: Report) -> None:
    print(f"\n{report.scope.name} violates {', '.join(report.violated)}:")
    print(render(report.trace, report.scope, report.cycle))


def check(scopes: tuple[Scope, ...], processes: int) -> int:
    began, bad = time.perf_counter(), []
    print(HEADER, flush=True)
    states = 0
    for report in reports(scopes, processes):
        print(line(report), flush=True)
        states += report.states
        if report.violated:
            bad.append(report)
    print(f"{states:,} states in {time.perf_counter() - began:.1f} s")
    print(f"{len(ALL_PROPERTIES)} properties: {' '.join(ALL_PROPERTIES)}")
    print(f"violations: {len(bad)}")
    for report in bad:
        show_counterexample(report)
    return 1 if bad else 0


def seed_bug(name: str) -> int:
    """Explore a seeded defect; succeeds if the defect is found."""
    known = DEFECTS[name]
    for prop in known.violates:
        report = explore(known.scope, only=[prop])
        print(f"{name}: {report.states:,} states, {report.seconds:.1f} s; seeks {prop}")
        if not report.violated:
            print("not found")
            return 1
        show_counterexample(report)
    return 0


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m spec", description=__doc__)
    parser.add_argument("--scope", default="full", choices=[*GROUPS, *SCOPES])
    parser.add_argument("--seed-bug", choices=sorted(DEFECTS))
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--list", action="store_true", help="list scopes and seeded defects")
    args = parser.parse_args(argv)
    if args.list:
        print("\n".join(f"{scope}" for scope in SCOPES.values()))
        print("\n".join(f"{d.name}: {' '.join(d.violates)}" for d in DEFECTS.values()))
        return 0
    if args.seed_bug:
        return seed_bug(args.seed_bug)
    return check(GROUPS.get(args.scope) or (SCOPES[args.scope],), args.processes)


if __name__ == "__main__":
    sys.exit(main())
