"""A pinned buffer of the ring is reused only after the device has finished with it."""

from __future__ import annotations

import pytest
import torch

from pagespec.runner.pinned import PinnedRing


class FakeEvent:
    """Stands for work on a GPU, which is done after the first wait for it."""

    def __init__(self) -> None:
        self.is_done = True

    def record(self) -> None:
        self.is_done = False

    def synchronize(self) -> None:
        self.is_done = True


@pytest.fixture
def ring(monkeypatch: pytest.MonkeyPatch) -> PinnedRing:
    monkeypatch.setattr(torch.cuda, "Event", FakeEvent)
    return PinnedRing(3, 4, torch.int32)


def test_a_buffer_is_waited_for_before_it_is_used_again(ring: PinnedRing) -> None:
    events = []
    for _ in range(3):
        index, *_ = ring.take()
        events.append(ring.release(index))
    assert not any(event.is_done for event in events)
    index, *_ = ring.take()
    assert index == 0
    assert [event.is_done for event in events] == [True, False, False]
    # Its next use is a new one.
    assert ring.release(index) is events[0]
    assert not events[0].is_done


def test_the_tensor_and_the_array_are_one_memory(ring: PinnedRing) -> None:
    index, tensor, array = ring.take()
    array[:] = 7
    assert tensor.tolist() == ring.tensor[index].tolist() == [7] * 4
    ring.take()[2][:] = 5
    assert tensor.tolist() == [7] * 4
