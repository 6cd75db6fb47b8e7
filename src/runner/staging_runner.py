"""The interfaces of model runners: with times, in this process, and with steps staged as arrays."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from numpy.typing import NDArray

from ..engine.plan import StepPlan
from ..engine.runner import Runner
from ..structured.grammars import Grammars


class TimedRunner(Runner, Protocol):
    """A runner over a KV cache.

    Attributes:
        num_blocks: KV blocks. pack_s, mask_s, wait_s: seconds of the host so far.
    """

    num_blocks: int

    @property
    def pack_s(self) -> float: ...

    @property
    def mask_s(self) -> float: ...

    @property
    def wait_s(self) -> float: ...


class LocalRunner(TimedRunner, Protocol):
    """A runner in this process.

    Attributes:
        num_state_slots, state_interval: of recurrent states; 0 of a model without.
        grammars: of its constrained requests.
    """

    num_state_slots: int
    state_interval: int
    grammars: Grammars


class StagingRunner(TimedRunner, Protocol):
    """The runner of one rank: ``dispatch`` in two, ``stage`` on rank 0 and ``launch`` on all."""

    @property
    def max_staged_bytes(self) -> int:
        """Most bytes of a step."""
        ...

    def stage(self, plan: StepPlan) -> Sequence[NDArray[Any]]:
        """The step as arrays."""
        ...

    def launch(self, arrays: Sequence[NDArray[Any]], plan: StepPlan | None = None) -> object:
        """Compute a staged step, or queue it; rank 0 gives its plan, for edited rows and
        ``on_logits``."""
        ...

    def is_computed(self, handle: Any, wait_s: float) -> bool:
        """Whether a launched step has been computed, after at most ``wait_s`` seconds."""
        ...

    def close(self) -> None:
        """Nothing is launched any more; let go of what holds the group."""
        ...
