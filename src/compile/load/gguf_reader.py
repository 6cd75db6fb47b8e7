"""Reads the keys of a GGUF file without making an object of each item of a list."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import numpy as np

_STRING, _ARRAY = 8, 9  # types of values, as the format numbers them
_MAX_ITEMS = 1000  # of a list that gguf's own reader takes apart


def open_gguf(path: Path) -> Any:
    """A ``gguf.GGUFReader`` that passes over long lists, such as the vocabulary.

    Tensors are mapped into memory, so those that are not looked at are not read.
    """
    from gguf import GGUFReader, GGUFValueType

    class Reader(GGUFReader):
        def _get_field_parts(self, orig_offs: int, raw_type: int) -> Any:
            if raw_type != _ARRAY:
                return super()._get_field_parts(orig_offs, raw_type)
            order, data = _byte_order(self), self.data.data
            item_type, num_items = struct.unpack_from(f"{order}IQ", data, orig_offs)
            scalar = self.gguf_scalar_to_np.get(GGUFValueType(item_type))
            is_text = item_type == _STRING
            if num_items <= _MAX_ITEMS or not (is_text or scalar):
                return super()._get_field_parts(orig_offs, raw_type)
            size = struct.calcsize("<IQ")
            if scalar:
                size += num_items * np.dtype(scalar).itemsize
            else:
                for _ in range(num_items):
                    (length,) = struct.unpack_from(f"{order}Q", data, orig_offs + size)
                    size += 8 + length
            return size, [], [], [GGUFValueType.ARRAY, GGUFValueType(item_type)]

    return Reader(path)


def read_values(reader: Any, key: str) -> list[Any]:
    """The values of a key, of a list those of all its items; none if the file lacks the key.

    Args:
        reader: of :func:`open_gguf`.

    Raises:
        UnicodeDecodeError, struct.error: the file is damaged there.
    """
    field = reader.fields.get(key)
    if field is None:
        return []
    order, data = _byte_order(reader), reader.data.data
    (length,) = struct.unpack_from(f"{order}Q", data, field.offset)
    offset = field.offset + 8 + length
    (kind,) = struct.unpack_from(f"{order}I", data, offset)
    offset, num_items = offset + 4, 1
    if kind == _ARRAY:
        kind, num_items = struct.unpack_from(f"{order}IQ", data, offset)
        offset += struct.calcsize("<IQ")
    if kind != _STRING:
        scalar = np.dtype(reader.gguf_scalar_to_np[kind]).newbyteorder(order)
        values: list[Any] = np.frombuffer(data, scalar, num_items, offset).tolist()
        return values
    texts = []
    unpack = struct.Struct(f"{order}Q").unpack_from
    for _ in range(num_items):
        (length,) = unpack(data, offset)
        offset += 8
        texts.append(str(data[offset : offset + length], "utf-8"))
        offset += length
    return texts


def _byte_order(reader: Any) -> str:
    return ">" if reader.byte_order == "S" else "<"
