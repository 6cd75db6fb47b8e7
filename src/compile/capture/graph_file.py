"""The file of a traced graph: JSON behind a line with its digest.

It holds no code. But it says which functions are called on which tensors, so a file is read only if
it belongs to this user and nobody else may write to it.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

from torch import Tensor

from ...disk_cache import read_sealed, write_sealed
from .graph_json import decode, encode
from .traced import Traced


def read_graph(
    folder: Path, key: str, constants: dict[str, Tensor], *, is_symbolic: bool = True
) -> Traced:
    """Read a graph, as of :func:`.decode`.

    Raises:
        FileNotFoundError: there is none.
        Exception: of any kind, if it is damaged.
    """
    data = json.loads(read_sealed(folder / f"{key}.json", key))
    return decode(data, constants, is_symbolic=is_symbolic)


def write_graph(
    folder: Path, key: str, traced: Traced, tensors: Iterable[tuple[str, Tensor]]
) -> None:
    """Write a graph over named tensors.

    Raises:
        NotSerializable: something in the graph has no form in a file.
        OSError: the file could not be written.
    """
    names: dict[int, str] = {}
    for name, tensor in tensors:
        names.setdefault(id(tensor), name)
    body = json.dumps(encode(traced, names), separators=(",", ":")).encode()
    write_sealed(folder / f"{key}.json", key, body)
