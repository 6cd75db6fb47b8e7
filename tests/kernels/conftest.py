"""GPU properties and memory for tests of several kernel packages."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from pagespec.kernels.arch import Arch
from pagespec.kernels.device import Gpu
from tests.support.paged import poisoned_memory


@pytest.fixture
def as_gpu(monkeypatch: pytest.MonkeyPatch) -> Callable[[Gpu], None]:
    """Has kernels chosen as for a card, whatever the device."""

    def become(card: Gpu) -> None:
        for kind, found in ((Gpu, card), (Arch, card.arch)):
            monkeypatch.setattr(kind, "of", lambda _, found=found: found)

    return become


@pytest.fixture
def poisoned(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fresh tensors hold NaN, on a GPU in tests that need one: what a kernel leaves out shows."""
    with poisoned_memory("cuda" if request.node.get_closest_marker("gpu") else "cpu"):
        yield
