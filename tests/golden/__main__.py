"""Print the golden table: every architecture under every condition beside Hugging Face `generate`.

    python -m tests.golden [device [names]]
    python -m tests.golden --thresholds
    python -m tests.golden --ranks N [names]

Names restrict the table to some architectures. `--thresholds` prints which integers of the configs
the probe tested. `--ranks N` runs each model with tensor parallelism over N processes of this CPU,
under one condition that combines all the hostile ones.

Exits with 1 if any row differs from `generate`.
"""

from __future__ import annotations

import sys

from pagespec import InvalidInputError, UnsupportedModelError
from tests.golden.harness import Condition, GoldenRow, check
from tests.golden.subjects import (
    BEYOND_CONDITIONS,
    RANKS_CONDITION,
    RECURRENT_CONDITIONS,
    SMOLLM2_CONDITIONS,
    TINY_CONDITIONS,
    beyond,
    on_ranks,
    reach,
    smollm2,
    tiny,
)
from tests.support.models import ARCHITECTURES
from tests.support.tiny_configs import RECURRENT, SPARSE


def print_thresholds() -> None:
    """One architecture per row. "(size)" marks an integer that is also the size of a weight or
    head."""
    print(f"{'model':<12} {'longest':>7} {'passes':>6}  thresholds (at each: t - 1, t and t + 1)")
    for arch in ARCHITECTURES:
        plan = reach(arch)
        found = sorted(plan.thresholds, key=lambda threshold: threshold.value)
        words = "; ".join(f"{t}{' (size)' if t.is_size else ''}" for t in found)
        print(f"{arch:<12} {plan.longest:>7} {len(plan.lengths):>6}  {words}", flush=True)
        if plan.beyond:
            print(f"{'':<12} not reached: {'; '.join(map(str, plan.beyond))}")


def print_row(row: GoldenRow, condition: Condition) -> int:
    """Print the row, with the reason if it failed; return 1 then."""
    try:
        check(row, condition)
    except AssertionError as error:
        print(f"{row}  FAILED: {str(error).splitlines()[0]}", flush=True)
        return 1
    print(row, flush=True)
    return 0


def print_ranks(num_ranks: int, names: list[str]) -> int:
    """Print one row per architecture, or why it is rejected. Returns the number of failures."""
    num_failed = 0
    print(GoldenRow.HEADER)
    for name in names:
        try:
            row = on_ranks(name, num_ranks)
        except (InvalidInputError, UnsupportedModelError) as error:
            print(f"{name:<16} refused: {error}", flush=True)
            continue
        num_failed += print_row(row, RANKS_CONDITION)
    return num_failed


def main() -> int:
    if "--ranks" in sys.argv:
        num_ranks, *names = sys.argv[sys.argv.index("--ranks") + 1 :]
        return 1 if print_ranks(int(num_ranks), names or ARCHITECTURES) else 0
    if "--thresholds" in sys.argv:
        print_thresholds()
        return 0
    device = sys.argv[1] if len(sys.argv) > 1 else "cpu"
    num_failed = 0
    print(GoldenRow.HEADER)
    for name in sys.argv[2:] or [*ARCHITECTURES, *SPARSE, *RECURRENT, "smollm2"]:
        if name == "smollm2":
            subject, usual = smollm2(device)
            runs = [(condition, usual) for condition in SMOLLM2_CONDITIONS]
        elif name in RECURRENT:
            subject, usual = tiny(name, device)
            runs = [(condition, usual) for condition in RECURRENT_CONDITIONS]
        else:
            subject, usual = tiny(name, device)
            runs = [(condition, usual) for condition in TINY_CONDITIONS]
            runs += [(condition, beyond(name, device)[1]) for condition in BEYOND_CONDITIONS]
        for condition, reference in runs:
            num_failed += print_row(subject.run(condition, reference), condition)
    print("all equal" if not num_failed else f"{num_failed} rows FAILED")
    return 1 if num_failed else 0


if __name__ == "__main__":
    sys.exit(main())
