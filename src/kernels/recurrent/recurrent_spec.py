"""The static parameters of one recurrent call, and the contents of a slot of its states.

Where a GPU computes a recurrence in chunks (:mod:`.chunked`), a slot has one *record* per tile of a
head's values. A record contains the state before the chunk of the last position, ``[tile, K]`` in
float32, and the *tail*: the chunk's positions so far. The tail has keys ``[CHUNK, K]`` and values
``[CHUNK, tile]`` in their dtypes, then in float32 decays and betas (in Mamba-2 step sizes), ``[2,
CHUNK]``, and the rows of M of :mod:`.chunked`, ``[CHUNK, CHUNK]``.

The program of a tile reads and writes only its own record. So heads that share keys, and the tiles
of a head, each have a copy of the keys.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

CHUNK = 16
"""Positions of a chunk. Chunks begin where an interval begins; its last one may be shorter."""

PREPARED_SIZE = 2 * CHUNK * CHUNK + 4 * CHUNK
"""Floats that ``chunk_inner_kernel`` computes per chunk and head: two matrices, four vectors."""

# Elements of a state per program: 64 registers of each thread of four warps.
_TILE_ELEMENTS = 8192
_MIN_SIDE = 16  # of a tile, for the matrix units


class RecordLayout(NamedTuple):
    """Layout of a record in units of float32: the offsets of its parts, and its size."""

    keys: int
    values: int
    scalars: int
    rows: int
    record: int


def padded(size: int) -> int:
    """The smallest power of two >= ``size`` that is large enough for the matrix units."""
    return max(_MIN_SIDE, 1 << (size - 1).bit_length())


def block_v(num_keys: int, num_values: int) -> int:
    """Values per tile. The number depends only on the state's shape, because it determines the
    contents of a slot."""
    return min(max(_MIN_SIDE, _TILE_ELEMENTS // padded(num_keys)), padded(num_values))


def record_layout(
    num_keys: int, num_values: int, key_dtype: torch.dtype, value_dtype: torch.dtype
) -> RecordLayout:
    tile = block_v(num_keys, num_values)
    keys = tile * num_keys
    values = keys + CHUNK * num_keys * key_dtype.itemsize // 4
    scalars = values + CHUNK * tile * value_dtype.itemsize // 4
    rows = scalars + 2 * CHUNK
    return RecordLayout(keys, values, scalars, rows, rows + CHUNK * CHUNK)


def slot_shape(
    num_heads: int, num_keys: int, num_values: int, *dtypes: torch.dtype
) -> tuple[int, int]:
    """(number of records, float32 elements per record) of a slot; ``dtypes`` of keys and values."""
    num_tiles = -(-num_values // block_v(num_keys, num_values))
    return num_heads * num_tiles, record_layout(num_keys, num_values, *dtypes).record


@dataclass(frozen=True, slots=True)
class RecurrentSpec:
    """What one recurrent call of the model keeps per request, as found by the probe.

    Attributes:
        call: its number in order of execution, 0, 1, 2, ...
        kind: the op of :mod:`.ops` that computes it.
        state_shape: shape of its state. state_dtype: name of its dtype.
        settings: the non-tensor arguments of the call, in the op's order.
        input_dtypes: names of the dtypes of its keys and values, where a GPU computes it in chunks.
    """

    call: int
    kind: str
    state_shape: tuple[int, ...]
    state_dtype: str
    settings: tuple[Any, ...]
    input_dtypes: tuple[str, ...] = ()

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> RecurrentSpec:
        """From the result of ``asdict`` after JSON has turned tuples into lists."""
        values: dict[str, Any] = {
            name: tuple(value) if isinstance(value, list) else value for name, value in data.items()
        }
        return cls(**values)

    @property
    def dtype(self) -> torch.dtype:
        found: torch.dtype = getattr(torch, self.state_dtype)
        return found

    def slot_shape(self, device: torch.device | str) -> tuple[int, ...]:
        """Shape of the contents of one slot: the state, or the records of a GPU."""
        if torch.device(device).type == "cpu" or not self.input_dtypes:
            return self.state_shape
        num_heads, num_keys, num_values = self.state_shape
        dtypes = (getattr(torch, name) for name in self.input_dtypes)
        return slot_shape(num_heads, num_keys, num_values, *dtypes)

    def num_bytes(self, device: torch.device | str) -> int:
        """Bytes of one slot."""
        return math.prod(self.slot_shape(device)) * self.dtype.itemsize
