"""The kill suite in about three seconds, for mutmut's hundreds of mutants.

mutmut runs it after the unit tests. `tests/mutants/kill.py` is the long form.
"""

from __future__ import annotations

import pytest

from tests.mutants.kill import walk
from tests.support.scenario import Scenario

# A mutant that never ends is stopped by the 5 s a test that `mutmut_run.py` allows; these two
# need more than that on a busy machine.
pytestmark = pytest.mark.timeout(60)


def test_engines_with_the_content_model_keep_every_property() -> None:
    for seed in range(120):
        Scenario(seed).run()


def test_walks_beside_the_specification_find_no_difference() -> None:
    for seed in range(100):
        walk(seed)
