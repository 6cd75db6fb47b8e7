"""The memory that ranks share, seen from two ranks: each maps the file itself."""

from __future__ import annotations

import gc
import os

import numpy as np
import pytest

from pagespec.distributed.channel import _TEXT_BYTES, Channel, State, digest_of

NUM_SLOTS, SLOT_BYTES = 3, 4096
DTYPES = [np.int32, np.int64, np.float32, np.bool_]


@pytest.fixture
def ends() -> tuple[Channel, Channel]:
    """The channel's ends of rank 0 and rank 1, with slots."""
    first = Channel(3)
    second = Channel(3, first.descriptor)
    for channel in (first, second):
        channel.make_slots(NUM_SLOTS, SLOT_BYTES)
    return first, second


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(), (0,), (1,), (7,), (3, 0), (2, 3, 5)])
def test_an_array_comes_as_it_was(
    ends: tuple[Channel, Channel], dtype: type, shape: tuple[int, ...]
) -> None:
    values = np.random.default_rng(0).integers(-1000, 1000, shape)
    array = np.asarray(values, dtype)
    ends[0].write(0, [array])
    (found,) = ends[1].read(0)
    assert (found.dtype, found.shape) == (array.dtype, array.shape)
    assert np.array_equal(found, array)


def test_a_step_is_any_number_of_arrays(ends: tuple[Channel, Channel]) -> None:
    arrays = [np.full(i % 4, i, DTYPES[i % 4]) for i in range(20)]
    arrays.append(np.arange(24, dtype=np.int64).reshape(4, 6).T)  # its memory has another order
    ends[0].write(5, arrays)
    found = ends[1].read(5)
    assert len(found) == len(arrays)
    assert all(np.array_equal(a, b) for a, b in zip(found, arrays, strict=True))
    assert digest_of(7, found, 3) == digest_of(7, arrays, 3)
    ends[0].write(6, [])
    assert ends[1].read(6) == []


def test_slots_are_used_in_turn(ends: tuple[Channel, Channel]) -> None:
    writer, reader = ends
    for step in range(4 * NUM_SLOTS):
        writer.write(step, [np.full(step, step, np.int32)])
        for earlier in range(max(step - NUM_SLOTS + 1, 0), step + 1):
            assert reader.read(earlier)[0].tolist() == [earlier] * earlier
    kept = reader.read(step)[0]
    writer.write(step + NUM_SLOTS, [np.zeros(step, np.int32)])
    assert kept.tolist() == [step] * step  # it is a copy


def test_a_step_that_is_too_large_is_refused_whole(ends: tuple[Channel, Channel]) -> None:
    writer, reader = ends
    fits = np.arange(SLOT_BYTES - 32, dtype=np.int64).astype(np.bool_)
    writer.write(0, [fits])
    with pytest.raises(ValueError, match=f"for a slot of {SLOT_BYTES}"):
        writer.write(0, [np.zeros(SLOT_BYTES - 31, np.bool_)])
    assert np.array_equal(reader.read(0)[0], fits)


def test_cells_are_seen_by_all(ends: tuple[Channel, Channel]) -> None:
    first, second = ends
    words = ["state", "num_started", "num_finished", "num_collectives", "digest"]
    assert all(getattr(cell, word) == 0 for cell in second.cells for word in words)
    for rank in range(3):
        for i, word in enumerate(words):
            setattr(first.cells[rank], word, 100 * rank + i)
    seen = [[getattr(cell, word) for word in words] for cell in second.cells]
    assert seen == [[100 * rank + i for i in range(len(words))] for rank in range(3)]
    second.cells[1].state = State.FAILED
    assert first.cells[1].state == State.FAILED
    second.cells[1].digest = (1 << 32) - 1
    assert first.cells[1].digest == (1 << 32) - 1
    with pytest.raises(AttributeError, match="num_tokens"):
        _ = first.cells[0].num_tokens


def test_texts_are_cut_to_their_cell(ends: tuple[Channel, Channel]) -> None:
    first, second = ends
    assert second.cells[1].text == ""
    room = _TEXT_BYTES
    for text in ("out of memory", "", "µ" * 10, "x" * room):
        first.cells[1].text = text
        assert second.cells[1].text == text
    first.cells[1].text = "y" + "µ" * room
    assert second.cells[1].text.startswith("yµµ")
    assert len(second.cells[1].text) == room // 2 + 1  # the last one in half
    assert second.cells[0].text == second.cells[2].text == ""
    assert second.cells[2].state == State.STARTING


def test_the_file_is_closed_with_its_channel() -> None:
    channel = Channel(2)
    channel.make_slots(NUM_SLOTS, SLOT_BYTES)
    descriptor = channel.descriptor
    os.fstat(descriptor)
    del channel
    gc.collect()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(descriptor)
