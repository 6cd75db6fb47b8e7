"""The kill suite: what a mutant has to survive. Exits with 1 and one line `KILLED property detail`,
or with 0. Runs in the mutant's own process; see `tests/mutants/__main__.py`."""

from __future__ import annotations

import sys

from tests.scenario import PropertyError, Scenario

NUM_SCENARIOS = 600


def main() -> int:
    for seed in range(NUM_SCENARIOS):
        try:
            Scenario(seed).run()
        except PropertyError as error:
            print(f"KILLED {error} [scenario {seed}]")
            return 1
        except Exception as error:  # the engine itself fell over
            print(f"KILLED crash: {type(error).__name__}: {error} [scenario {seed}]")
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
