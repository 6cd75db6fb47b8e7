"""GPU runners on a machine without a GPU; their kernels run under Triton's interpreter."""

from __future__ import annotations

import os

import pytest
import torch

from tests.support.packers import PassedEvent


@pytest.fixture
def passed_events(monkeypatch: pytest.MonkeyPatch) -> None:
    """CUDA events pass as soon as they are recorded."""
    monkeypatch.setattr(torch.cuda, "Event", PassedEvent)


@pytest.fixture
def small_chunks(passed_events: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Edited rows are sent in chunks of two, so few requests need several launches."""
    if os.environ.get("TRITON_INTERPRET") == "1":
        pytest.importorskip("triton")
        monkeypatch.setattr("pagespec.runner.gpu.edits.CHUNK", 2)
