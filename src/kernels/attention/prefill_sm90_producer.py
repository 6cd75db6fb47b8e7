"""The producer warps of Hopper's prefill attention. They fill the ring of :mod:`.prefill_sm90` with
keys and values.

``produce`` is one warp that loads through TMA. A message is a part of a block: up to ``BLOCK_N``
slots by 64 elements. ``convert`` is a warpgroup for e4m3 elements: it loads the next step into
registers while it converts the current one to float16. Then a slot of the ring holds the keys of
step s, the values of step s - 1, and the scales of both. Vectors are stored in halves
(:mod:`.prefill_sm90_consumer`).
"""

# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma

from ..fused.e4m3_store import SCALE_BYTES, block_width
from .e4m3_tiles import CONVERT, scale_exponents
from .prefill_sm90_consumer import SCALE_ROWS, STEP_N, keys_of, values_of


@gluon.jit
def _halves(words):
    """The even and the odd elements of words of four e4m3 elements, as pairs of float16."""
    return gl.inline_asm_elementwise(
        CONVERT, "=r,=r,r", [words], dtype=(gl.uint32, gl.uint32), is_pure=True, pack=1
    )


@gluon.jit
def _store_halves(words, target):
    """Convert ``words [N, D / 4]`` of four e4m3 elements each to float16, and store them to
    ``target [N, D]`` in the ring, even elements first."""
    N: gl.constexpr = words.shape[0]
    WIDTH: gl.constexpr = words.shape[1] * 2
    even, odd = _halves(words)
    both = gl.join(even, odd).permute([0, 2, 1]).reshape([N, WIDTH])
    # Pairs of float16: the ring's 16-byte swizzle keeps a pair together.
    PAIRS: gl.constexpr = gl.NVMMASharedLayout(128, 32, 2)
    target._reinterpret(gl.uint32, [N, WIDTH], PAIRS).store(both)


@gluon.jit
def _blocks_of(table, start, last, PAGE: gl.constexpr, LAYOUT: gl.constexpr):
    """Block ids of the step at ``start``: one if one block contains the step, else one per
    position. Positions beyond ``last`` are replaced by ``last``."""
    if PAGE >= STEP_N:
        positions = gl.minimum(start, last)
    else:
        positions = gl.minimum(start + gl.arange(0, STEP_N, LAYOUT), last)
    return gl.load(table + positions // PAGE)


@gluon.jit
def _words_of(
    cache, blocks, start, D: gl.constexpr, PAGE: gl.constexpr, BLOCK: gl.constexpr,
    LAYOUT: gl.constexpr,
):  # fmt: skip
    """The vectors of a step, four elements per word: ``[STEP_N, D / 4]``."""
    WIDTH: gl.constexpr = D // 4
    offsets = gl.arange(0, STEP_N, gl.SliceLayout(1, LAYOUT))
    words = gl.arange(0, WIDTH, gl.SliceLayout(0, LAYOUT))
    base = cache.to(gl.pointer_type(gl.uint32)) + blocks.to(gl.int64) * (BLOCK // 4)
    if PAGE >= STEP_N:
        rows = base + (start & (PAGE - 1)) * WIDTH + (offsets * WIDTH)[:, None]
    else:
        rows = (base + (offsets & (PAGE - 1)) * WIDTH)[:, None]
    return gl.load(rows + words[None, :])


@gluon.jit
def _scales_of(cache, blocks, start, PAGE: gl.constexpr, BLOCK: gl.constexpr, LINE: gl.constexpr):
    """The scales ``[STEP_N]`` of a step."""
    offsets = gl.arange(0, STEP_N, LINE)
    base = cache.to(gl.pointer_type(gl.float32)) + blocks.to(gl.int64) * (BLOCK // SCALE_BYTES)
    if PAGE >= STEP_N:
        pointers = base + (start & (PAGE - 1)) + offsets
    else:
        pointers = base + (offsets & (PAGE - 1))
    return gl.load(pointers)


@gluon.jit
def _store_scales(scales, slot, k_scales, v_scales):
    """The rows of scales of a slot, as the consumer warpgroups read them."""
    scales.index(slot * SCALE_ROWS).store(k_scales)
    scales.index(slot * SCALE_ROWS + 1).store(v_scales)
    scales.index(slot * SCALE_ROWS + 2).store(scale_exponents(v_scales))


@gluon.jit
def convert(
    k_cache, v_cache, table, head, part, first_step, last, ring, scales, full, empty,  # noqa: ARG001
    HKV: gl.constexpr, PAGE: gl.constexpr, K_PAD: gl.constexpr, D: gl.constexpr,  # noqa: ARG001
    DV: gl.constexpr, STAGES: gl.constexpr,  # noqa: ARG001 (arguments are those of produce)
):  # fmt: skip
    """Convert the keys of the first step; then the keys of each next step with values and scales of
    the step before it; then the values and scales of the last step."""
    WIDTH: gl.constexpr = D // 4
    BLOCK: gl.constexpr = block_width(True, PAGE, HKV, D)
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 4], [128 // WIDTH, WIDTH // 4], [4, 1], [1, 0])
    ROW: gl.constexpr = gl.SliceLayout(1, LAYOUT)
    LINE: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    keys = k_cache + head * (PAGE * D)
    values = v_cache + head * (PAGE * D)
    k_scales_at = k_cache + (HKV * PAGE * D + head * (PAGE * SCALE_BYTES))
    v_scales_at = v_cache + (HKV * PAGE * D + head * (PAGE * SCALE_BYTES))
    end = last // STEP_N + 1
    start = first_step * STEP_N
    blocks = _blocks_of(table, start, last, PAGE, ROW)
    k = _words_of(keys, blocks, start, D, PAGE, BLOCK, LAYOUT)
    v = _words_of(values, blocks, start, D, PAGE, BLOCK, LAYOUT)
    scale_blocks = _blocks_of(table, start, last, PAGE, LINE)
    k_scales = _scales_of(k_scales_at, scale_blocks, start, PAGE, BLOCK, LINE)
    v_scales = _scales_of(v_scales_at, scale_blocks, start, PAGE, BLOCK, LINE)
    blocks = _blocks_of(table, start + STEP_N, last, PAGE, ROW)
    _store_halves(k, keys_of(ring, 0, D))
    fence_async_shared()
    mbarrier.arrive(full.index(0), count=1)
    k = _words_of(keys, blocks, start + STEP_N, D, PAGE, BLOCK, LAYOUT)
    slot = 1
    phase = 1
    for step in range(first_step + 1, end):
        start = step * STEP_N
        following = _blocks_of(table, start + STEP_N, last, PAGE, ROW)
        scale_blocks = _blocks_of(table, start, last, PAGE, LINE)
        mbarrier.wait(empty.index(slot), phase)
        _store_scales(scales, slot, k_scales, v_scales)
        _store_halves(v, values_of(ring, slot, 0, D))
        v = _words_of(values, blocks, start, D, PAGE, BLOCK, LAYOUT)
        _store_halves(k, keys_of(ring, slot, D))
        k = _words_of(keys, following, start + STEP_N, D, PAGE, BLOCK, LAYOUT)
        fence_async_shared()
        mbarrier.arrive(full.index(slot), count=1)
        k_scales = _scales_of(k_scales_at, scale_blocks, start, PAGE, BLOCK, LINE)
        v_scales = _scales_of(v_scales_at, scale_blocks, start, PAGE, BLOCK, LINE)
        blocks = following
        slot += 1
        if slot == STAGES:
            slot = 0
            phase ^= 1
    mbarrier.wait(empty.index(slot), phase)
    # Unowned slots may hold NaN, but values must be finite.
    beyond = last - (end - 1) * STEP_N
    v_scales = gl.where(gl.arange(0, STEP_N, LINE) <= beyond, v_scales, 0.0)
    exists = gl.arange(0, STEP_N, ROW) <= beyond
    _store_scales(scales, slot, k_scales, v_scales)
    v = gl.where(exists[:, None], v, gl.zeros_like(v))
    _store_halves(v, values_of(ring, slot, 0, D))
    fence_async_shared()
    mbarrier.arrive(full.index(slot), count=1)


@gluon.jit
def _load_async(desc, table, start, last, head, element, target, bar, PAGE: gl.constexpr):
    """Start loading a head's elements from ``element`` on, at positions from ``start`` on, in parts
    of a block: ``target [N, D]``, 64 elements of a row at a time."""
    N: gl.constexpr = target.shape[0]
    ROWS: gl.constexpr = desc.block_type.shape[0]
    COUNT: gl.constexpr = N // ROWS
    PANELS: gl.constexpr = target.shape[1] // 64
    PADDED: gl.constexpr = len(desc.block_type.shape) == 3
    NUM: gl.constexpr = COUNT * PANELS
    SHAPE: gl.constexpr = [NUM, ROWS, 1, 64] if PADDED else [NUM, ROWS, 64]
    parts = target._reinterpret(target.dtype, SHAPE, desc.layout)
    for i in gl.static_range(COUNT):
        # After the end of the context, load its last block again.
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
    k_desc, v_desc, table, head, part, first_step, last, ring, scales, full, empty,  # noqa: ARG001
    HKV: gl.constexpr, PAGE: gl.constexpr, K_PAD: gl.constexpr, DK: gl.constexpr,  # noqa: ARG001
    DV: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Load the keys of the first step; then the keys of each next step with the values of the step
    before it; then the values of the last step.

    Args:
        part: the first element of the values that are loaded.
    """
    V_PAD: gl.constexpr = ring.shape[2]
    K_BYTES: gl.constexpr = STEP_N * K_PAD * 2
    V_BYTES: gl.constexpr = STEP_N * V_PAD * 2
    # For padded heads, the descriptor has a dimension for the head.
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
