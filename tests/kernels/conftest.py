"""Cards for tests of several rooms of kernels."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from pagespec.kernels.arch import Arch
from pagespec.kernels.device import Gpu


@pytest.fixture
def as_gpu(monkeypatch: pytest.MonkeyPatch) -> Callable[[Gpu], None]:
    """Has kernels chosen as for a card, whatever the device."""

    def become(card: Gpu) -> None:
        for kind, found in ((Gpu, card), (Arch, card.arch)):
            monkeypatch.setattr(kind, "of", lambda _, found=found: found)

    return become
