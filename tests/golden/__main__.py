"""`python -m tests.golden [device [names]]`: the golden table, every architecture (or the named
ones) under every condition. `python -m tests.golden --thresholds` prints instead at which integers
of their configs the probe looked.

Exits with 1 if any row differs from Hugging Face `generate`."""

from __future__ import annotations

import sys

from tests.golden.harness import GoldenRow, check
from tests.golden.subjects import (
    BEYOND_CONDITIONS,
    SMOLLM2_CONDITIONS,
    TINY_CONDITIONS,
    beyond,
    reach,
    smollm2,
    tiny,
)
from tests.support.models import ARCHITECTURES


def print_thresholds() -> None:
    """An architecture a row. "(size)" also is the size of a weight or of attention heads."""
    print(f"{'model':<12} {'longest':>7} {'passes':>6}  thresholds (at each: t - 1, t and t + 1)")
    for arch in ARCHITECTURES:
        plan = reach(arch)
        found = sorted(plan.thresholds, key=lambda threshold: threshold.value)
        words = "; ".join(f"{t}{' (size)' if t.is_size else ''}" for t in found)
        print(f"{arch:<12} {plan.longest:>7} {len(plan.lengths):>6}  {words}", flush=True)
        if plan.beyond:
            print(f"{'':<12} not reached: {'; '.join(map(str, plan.beyond))}")


def main() -> int:
    if "--thresholds" in sys.argv:
        print_thresholds()
        return 0
    device = sys.argv[1] if len(sys.argv) > 1 else "cpu"
    num_failed = 0
    print(GoldenRow.HEADER)
    for name in sys.argv[2:] or [*ARCHITECTURES, "smollm2"]:
        if name == "smollm2":
            subject, usual = smollm2(device)
            runs = [(condition, usual) for condition in SMOLLM2_CONDITIONS]
        else:
            subject, usual = tiny(name, device)
            runs = [(condition, usual) for condition in TINY_CONDITIONS]
            runs += [(condition, beyond(name, device)[1]) for condition in BEYOND_CONDITIONS]
        for condition, reference in runs:
            row = subject.run(condition, reference)
            try:
                check(row, condition)
                print(row, flush=True)
            except AssertionError as error:
                num_failed += 1
                print(f"{row}  FAILED: {str(error).splitlines()[0]}", flush=True)
    print("all equal" if not num_failed else f"{num_failed} rows FAILED")
    return 1 if num_failed else 0


if __name__ == "__main__":
    sys.exit(main())
