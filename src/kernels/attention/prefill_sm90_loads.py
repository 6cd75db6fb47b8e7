"""The loading warp of Hopper's prefill attention: keys and values through TMA into a ring.

A message is a part of a block: up to ``BLOCK_N`` slots by 64 elements. See :mod:`.prefill_sm90`.
"""

# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

from .prefill_sm90_softmax import STEP_N, keys_of, values_of


@gluon.jit
def _load_async(desc, table, start, last, head, element, target, bar, PAGE: gl.constexpr):
    """Start loading positions from ``start`` on, of a head from ``element`` on, in parts of a
    block: ``target [N, D]``, a row of it 64 elements after another."""
    N: gl.constexpr = target.shape[0]
    ROWS: gl.constexpr = desc.block_type.shape[0]
    COUNT: gl.constexpr = N // ROWS
    PANELS: gl.constexpr = target.shape[1] // 64
    PADDED: gl.constexpr = len(desc.block_type.shape) == 3
    NUM: gl.constexpr = COUNT * PANELS
    SHAPE: gl.constexpr = [NUM, ROWS, 1, 64] if PADDED else [NUM, ROWS, 64]
    parts = target._reinterpret(target.dtype, SHAPE, desc.layout)
    for i in gl.static_range(COUNT):
        # Behind the end of the context: its last block once more.
        position = gl.minimum(start + i * ROWS, last)
        block = gl.load(table + position // PAGE)
        slot = block * PAGE + position % PAGE // ROWS * ROWS
        for panel in gl.static_range(PANELS):
            if PADDED:
                at = [slot, head, element + panel * 64]
            else:
                at = [slot, element + panel * 64]
            tma.async_copy_global_to_shared(desc, at, bar, parts.index(panel * COUNT + i))


@gluon.jit
def _load_keys(
    desc, table, step, last, head, element, ring, slot, bar, PAGE: gl.constexpr, D: gl.constexpr
):
    keys = keys_of(ring, slot, D)
    _load_async(desc, table, step * STEP_N, last, head, element, keys, bar, PAGE)


@gluon.jit
def _load_values(
    desc, table, step, last, head, element, ring, slot, bar, PAGE: gl.constexpr, D: gl.constexpr
):
    BLOCK_N: gl.constexpr = ring.shape[1]
    for tile in gl.static_range(STEP_N // BLOCK_N):
        values = values_of(ring, slot, tile, D)
        start = step * STEP_N + tile * BLOCK_N
        _load_async(desc, table, start, last, head, element, values, bar, PAGE)


@gluon.jit
def produce(
    k_desc, v_desc, table, head, part, first_step, last, ring, full, empty,
    PAGE: gl.constexpr, K_PAD: gl.constexpr, DK: gl.constexpr, DV: gl.constexpr,
    STAGES: gl.constexpr,
):  # fmt: skip
    """Keys of the first step alone, keys of each next one with values of the one before, and the
    last one's values alone.

    Args:
        part: the first element of the values that are loaded.
    """
    V_PAD: gl.constexpr = ring.shape[2]
    K_BYTES: gl.constexpr = STEP_N * K_PAD * 2
    V_BYTES: gl.constexpr = STEP_N * V_PAD * 2
    # Of heads that are padded, a descriptor has a dimension for the head.
    k_at = 0
    v_at = part
    if len(k_desc.block_type.shape) == 2:
        k_at = head * DK
    if len(v_desc.block_type.shape) == 2:
        v_at = head * DV + part
    end = last // STEP_N + 1
    mbarrier.expect(full.index(0), K_BYTES)
    _load_keys(k_desc, table, first_step, last, head, k_at, ring, 0, full.index(0), PAGE, K_PAD)
    slot = 1
    phase = 1
    for step in range(first_step + 1, end):
        bar = full.index(slot)
        mbarrier.wait(empty.index(slot), phase)
        mbarrier.expect(bar, K_BYTES + V_BYTES)
        _load_values(v_desc, table, step - 1, last, head, v_at, ring, slot, bar, PAGE, K_PAD)
        _load_keys(k_desc, table, step, last, head, k_at, ring, slot, bar, PAGE, K_PAD)
        slot += 1
        if slot == STAGES:
            slot = 0
            phase ^= 1
    bar = full.index(slot)
    mbarrier.wait(empty.index(slot), phase)
    mbarrier.expect(bar, V_BYTES)
    _load_values(v_desc, table, end - 1, last, head, v_at, ring, slot, bar, PAGE, K_PAD)
