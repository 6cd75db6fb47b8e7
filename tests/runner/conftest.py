"""GPU runners on a machine without a GPU; their kernels run under Triton's interpreter."""

from __future__ import annotations

import importlib.util
import os

import pytest
import torch

from tests.support.packers import PassedEvent


@pytest.fixture
def passed_events(monkeypatch: pytest.MonkeyPatch) -> None:
    """CUDA events pass as soon as they are recorded."""
    monkeypatch.setattr(torch.cuda, "Event", PassedEvent)


@pytest.fixture(autouse=True)
def _short_stretches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Interpreted programs of the sampler read no more ids than tiny vocabularies have. Tests of
    the kernels read as many as on a GPU; groups, and so bits, are the same."""
    if os.environ.get("TRITON_INTERPRET") == "1" and importlib.util.find_spec("triton"):
        for name in ("gumbel", "logprobs"):
            monkeypatch.setattr(f"pagespec.kernels.sampling.{name}._STRETCH", 512)


@pytest.fixture
def small_chunks(passed_events: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Edited rows are sent in chunks of two, so few requests need several launches."""
    if os.environ.get("TRITON_INTERPRET") == "1":
        pytest.importorskip("triton")
        monkeypatch.setattr("pagespec.runner.gpu.edits.CHUNK", 2)
