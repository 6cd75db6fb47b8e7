"""Tile sizes of the matmul kernels for few rows, measured or by a rule; and a rule for when the
kernel for many rows is faster than cuBLAS.

Where bits were compared (16-bit dtypes, rows of whole 16-byte units), the tile affects only speed.
Elsewhere a weight has one tile for all row counts (:func:`has_one_tile`).
"""

from __future__ import annotations

from ..device import _LARGE_SHARED_BYTES, Gpu
from ..registry import registry
from .matmul import Tile
from .tuned_tiles import GATED, TUNED, TUNED_PREFETCH, PrefetchTile, _swapped, _tile

_SHORT_PRODUCT_BYTES = 24 << 20
_MOST_STAGES = 16
_BUCKETS = (16, 32, 64, 128, 256)  # rows; the last bucket also serves all larger counts


MANY_ROWS = 128  # rows of x in a tile of :mod:`.sm90.matmul_sm90_many`
MANY_WEIGHT_ROWS = 256  # rows of the weight in such a tile; with a gate half of them are up's
_LEAST_MANY_ROWS = 512
_MOST_MANY_SUMMANDS = 4096
_MOST_MANY_SUMMANDS_GATED = 5120
_SHORT_SUMMANDS = 1024

_ONE_TILE_WIDE = _tile(32, 32, 32, 3)  # no matrix unit: small, to fit the registers
_ONE_TILE_NARROW = _tile(32, 64, 64, 3)


def has_one_tile(k_size: int, itemsize: int) -> bool:
    """Whether a weight with rows of ``k_size`` elements has one tile for all row counts.

    On an H100 (Triton 3.6) every tile gave the same bits for 16-bit dtypes and rows of whole
    16-byte units. For float32, and for float16 with K = 50, this was not established.
    """
    return itemsize == 4 or k_size * itemsize % 16 != 0


def choose_tile(
    num_rows: int, num_outs: int, k_size: int, itemsize: int, has_gate: bool, card: Gpu
) -> Tile:
    """The tile for ``num_rows`` rows, by their bucket and the shape of the weight.

    One tile for all row counts where :func:`has_one_tile`.

    Args:
        num_outs: N of the matmul; a weight of gate and up has twice as many rows.
        k_size: K of the matmul. itemsize: bytes per element. card: the GPU.
    """
    if has_one_tile(k_size, itemsize):
        return _ONE_TILE_WIDE if itemsize == 4 else _ONE_TILE_NARROW
    bucket = _bucket_of(num_rows) or _BUCKETS[-1]
    if not card.is_large:
        return _small_tile(bucket, num_outs, k_size, has_gate, card.num_sms)
    shape = num_outs, k_size
    tuned = TUNED.get(shape, {}).get(bucket) if shape in GATED or not has_gate else None
    if tuned is not None:
        return tuned
    if bucket == 16:
        return _swapped(16, 64, 128, 5) if has_gate else _swapped(16, 64, 256, 4)
    if bucket == 32:
        return _swapped(32, 64, 128, 5)
    if bucket == 64:
        return _tile(64, 32, 128, 5)
    if num_outs >= 64 * card.num_sms:
        return _tile(128, 128, 64, 4, warps=8)
    return _tile(64, 64, 128, 4) if bucket == 128 else _tile(128, 64, 64, 5)


def choose_prefetch_tile(
    num_rows: int, num_outs: int, k_size: int, has_gate: bool, card: Gpu
) -> PrefetchTile | None:
    """The tile for a bfloat16 matmul without bias, or None if :func:`choose_tile` applies.

    Up to 16 rows, and for most weights, a rule decides (:func:`_early_for_few`). Measured tiles
    apply to larger row counts and to weights for which others were faster, and similar tiles to
    other short weights.

    Args:
        num_outs: N of the matmul; a weight of gate and up has twice as many rows.
    """
    bucket = _bucket_of(num_rows)
    if bucket is None or k_size % 64:
        return None
    tuned = TUNED_PREFETCH.get((num_outs, k_size, has_gate), {})
    if num_rows <= 8 and 8 in tuned:
        return tuned[8]
    if bucket in tuned:
        return tuned[bucket]
    if bucket > 16:
        return None if tuned else _early_for_more(bucket, num_outs, k_size, has_gate)
    return _early_for_few(8 if num_rows <= 8 else 16, num_outs, k_size, has_gate, card.num_sms)


def tuned_prefetch_rows(num_outs: int, k_size: int, has_gate: bool) -> tuple[int, ...]:
    """Row counts whose tiles were measured for this shape."""
    return tuple(TUNED_PREFETCH.get((num_outs, k_size, has_gate), ()))


def _early_for_few(
    x_rows: int, num_outs: int, k_size: int, has_gate: bool, num_sms: int
) -> PrefetchTile | None:
    """The tile for at most ``x_rows`` rows, 8 or 16. The rule follows the fastest tiles among the
    weights of eight models on an H100, alone and in the engine (docs/notes/matmul.md).

    *Short weights*: each program has its own multiprocessor and fills its shared memory; there are
    as few programs as possible. With more, programs of the next kernel find no slot in which to
    prefetch their weights. The router of a mixture of experts has few outputs.

    *Long weights* are read slowly by few programs. If not all programs have a slot at once in
    either layout, three or four share a multiprocessor. If that is not enough, they run in many
    waves; for LM heads, two at a time.
    """
    parts = _parts(has_gate)
    shape = num_outs, k_size, has_gate
    candidates: list[tuple[int, int, int, int]] = []  # part, rows of x, share, most stages
    if num_outs * k_size * (4 if has_gate else 2) < _SHORT_PRODUCT_BYTES:
        whole = [part for part in parts[:-1] if 40 <= num_outs // part <= num_sms]
        candidates += [(part, x_rows, 1, _MOST_STAGES) for part in whole]
        if 8 <= num_outs // parts[-1] <= num_sms and k_size <= 64 * 4 * _MOST_STAGES:
            candidates.append((parts[-1], x_rows, 1, _MOST_STAGES))
    else:
        for part, least in zip(parts, (96, 80), strict=False):
            if least <= num_outs // part <= num_sms:
                candidates.append((part, 16, 1, 8))
    for part in parts[1:3]:
        share = -(-num_outs // (part * num_sms))
        if 2 <= share <= 4:
            candidates.append((part, x_rows, max(share, 3), _MOST_STAGES))
    if 96 * parts[0] <= num_outs <= 512 * parts[0]:
        candidates.append((parts[0], 16, 1, 8))
    for part, rows, share, most_stages in candidates:
        tile = _filling_tile(part, rows, share, most_stages, *shape)
        if tile is not None:
            return tile
    tile = PrefetchTile(parts[0], 2, 5)  # two per multiprocessor
    return tile if num_outs > 512 * parts[0] and tile.fits(*shape) else None


def _filling_tile(
    part: int, x_rows: int, share: int, most_stages: int, num_outs: int, k_size: int, has_gate: bool
) -> PrefetchTile | None:
    """As many stages as shared memory holds for each of ``share`` programs. None if these are fewer
    than three and not all of K, or if the shape has no whole parts."""
    num_atoms = k_size // 64
    atoms = next(a for a in (4 if share == 1 else 2, 2, 1) if num_atoms % a == 0)
    rows = part * (2 if has_gate else 1)
    # In addition to stages: barriers, and padding that the last operand reads.
    room = _LARGE_SHARED_BYTES // share - 2048 - max(0, 64 - rows) * 128
    stages = min(room // (atoms * (rows + x_rows) * 128), num_atoms // atoms, most_stages)
    tile = PrefetchTile(part, atoms, stages, x_rows)
    is_enough = stages >= min(3, num_atoms // atoms)
    return tile if is_enough and tile.fits(num_outs, k_size, has_gate) else None


def _early_for_more(bucket: int, num_outs: int, k_size: int, has_gate: bool) -> PrefetchTile | None:
    if bucket > 64 or num_outs * k_size * 2 >= _SHORT_PRODUCT_BYTES:
        return None
    atoms = next(a for a in (4, 2, 1) if k_size // 64 % a == 0)
    for part in _parts(has_gate)[:3]:
        tile = PrefetchTile(part, atoms, min(4, k_size // 64 // atoms), 32)
        if num_outs // part * (bucket // 32) >= 32 and tile.fits(num_outs, k_size, has_gate):
            return tile
    return None


def _bucket_of(num_rows: int) -> int | None:
    return next((b for b in _BUCKETS if num_rows <= b), None)


def _parts(has_gate: bool) -> tuple[int, ...]:
    """Options for the rows of the weight per program, starting with the most of one warpgroup."""
    return (32, 16, 8) if has_gate else (64, 32, 16, 8)


def _small_tile(bucket: int, num_outs: int, k_size: int, has_gate: bool, num_sms: int) -> Tile:
    """For less shared memory, and for operands that are loaded through registers."""
    if bucket > 64:
        block_n = 128 if num_outs >= 64 * num_sms else 64
        block_m = 128 if bucket > 128 else 64
        num_warps = 8 if block_m * block_n > 64 * 128 else 4
        return _tile(block_m, block_n, 64, 3 if has_gate else 4, num_warps)
    # The widest tile that keeps most of the multiprocessors busy.
    widths = (64, 32, 16)
    block_n = next((w for w in widths if 10 * num_outs >= 7 * w * num_sms), widths[-1])
    if bucket > 16:
        return _tile(bucket, block_n, 128, 3 if has_gate else 4)
    block_k = 256 if block_n == 16 and k_size % 256 == 0 else 128
    return _tile(16, block_n, block_k, 5 if block_n == 32 else 4)


def fastest_custom_rows(num_outs: int, k_size: int, has_gate: bool, card: Gpu) -> int:
    """The largest row count at which the own kernel was measured to be faster than cuBLAS.

    Args:
        num_outs: N of the matmul; a weight of gate and up has twice as many rows.
    """
    if not card.is_large:
        return 16
    shape = num_outs, k_size
    tuned = [*TUNED.get(shape, ())] if has_gate == (shape in GATED) else []
    early = registry().find("few_rows_matmul", "bfloat16", card.arch)
    if early is not None:
        tuned += early.function("tuned_rows")(num_outs, k_size, has_gate)
    if tuned:
        return max(tuned)
    num_bytes = num_outs * k_size * (4 if has_gate else 2)
    return 64 if num_bytes < _SHORT_PRODUCT_BYTES else 16


def fits_many_rows(num_outs: int, k_size: int) -> bool:
    """Whether :mod:`.sm90.matmul_sm90_many` supports such a matmul.

    Args:
        num_outs: N of the matmul; a weight of gate and up has twice as many rows.
    """
    num_steps, rest = divmod(k_size, 64)
    # The outputs of a tile are stored during the steps of the next one, 64 of its columns in each,
    # from the second step on. TMA takes rows of whole 16-byte units.
    return rest == 0 and num_steps > MANY_WEIGHT_ROWS // 64 and num_outs % 8 == 0


def count_many_tiles(num_rows: int, num_outs: int, has_gate: bool) -> int:
    """Number of tiles of :mod:`.sm90.matmul_sm90_many`."""
    return -(-num_rows // MANY_ROWS) * -(-num_outs // _outs_per_tile(has_gate))


def may_take_many_rows(num_outs: int, k_size: int, has_gate: bool) -> bool:
    """Whether :func:`is_quicker_for_many_rows` holds for some row counts."""
    part = _outs_per_tile(has_gate)
    most_summands = _MOST_MANY_SUMMANDS_GATED if has_gate else _MOST_MANY_SUMMANDS
    return (
        k_size <= most_summands
        and fits_many_rows(num_outs, k_size)
        and num_outs >= _least_fill(k_size, has_gate) * part * -(-num_outs // part)
    )


def is_quicker_for_many_rows(
    num_rows: int, num_outs: int, k_size: int, has_gate: bool, card: Gpu
) -> bool:
    """Whether :mod:`.sm90.matmul_sm90_many` is faster than cuBLAS, as far as measured.

    It has one tile size, so its time is that of whole waves of tiles, one per multiprocessor.
    cuBLAS switches to smaller tiles, which are slower where waves are full. So the result depends
    on the *fill*: the outputs as a fraction of those that the waves have slots for. Rates on an
    H200, relative to cuBLAS, with a gate and its activation (docs/notes/matmul.md):

    - without a gate, fill 0.97: 1.00 to 1.14 in all 8 cases of K from 1,024 to 4,096, but with
      K = 12,288 1.01 (2,048 rows) and 0.96 (8,192); fill 0.73: 0.79; 0.12 and 0.48: 0.27 to 0.66.
    - with a gate, fill 0.97 to 0.99: 1.08 to 1.10 with K = 4,096, 1.35 and 1.37 with 1,024; fill
      0.85, K = 4,096: 0.91; fill 0.73, K = 1,024: 0.95.

    The bounds are close to where lines between those cases cross 1. The rule is wrong in one of the
    27 cases: K = 12,288 at 2,048 rows, where it loses 0.9%. K = 5,120 with a gate and fewer than
    512 rows were not measured.

    Args:
        num_outs: N of the matmul; a weight of gate and up has twice as many rows.
    """
    if num_rows < _LEAST_MANY_ROWS or not may_take_many_rows(num_outs, k_size, has_gate):
        return False
    num_waves = -(-count_many_tiles(num_rows, num_outs, has_gate) // card.num_sms)
    num_tiles = -(-num_rows // MANY_ROWS) * num_outs / _outs_per_tile(has_gate)
    return num_tiles >= _least_fill(k_size, has_gate) * num_waves * card.num_sms


def _outs_per_tile(has_gate: bool) -> int:
    return MANY_WEIGHT_ROWS // (2 if has_gate else 1)


def _least_fill(k_size: int, has_gate: bool) -> float:
    if not has_gate:
        return 0.95
    # The shorter the sums, the larger is the share of a separate activation kernel.
    return 0.8 if k_size <= _SHORT_SUMMANDS else 0.92
