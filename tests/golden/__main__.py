"""`python -m tests.golden [device [names]]`: the golden table, every architecture (or the named
ones) under every condition.

Exits with 1 if any row differs from Hugging Face `generate`."""

from __future__ import annotations

import sys

from tests.golden.harness import GoldenRow, check
from tests.golden.subjects import SMOLLM2_CONDITIONS, TINY_CONDITIONS, smollm2, tiny
from tests.models import ARCHITECTURES


def main() -> int:
    device = sys.argv[1] if len(sys.argv) > 1 else "cpu"
    num_failed = 0
    print(GoldenRow.HEADER)
    for name in sys.argv[2:] or [*ARCHITECTURES, "smollm2"]:
        subject, reference = smollm2(device) if name == "smollm2" else tiny(name, device)
        for condition in SMOLLM2_CONDITIONS if name == "smollm2" else TINY_CONDITIONS:
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
