"""Disk cache of the recipes of a CPU's matmuls: trials of :mod:`.invariant`, made once for a
shape, processor and library."""

from __future__ import annotations

import hashlib
import json
import os
import platform
from contextlib import suppress
from pathlib import Path

import torch

from ...disk_cache import write_whole
from . import invariant
from .invariant import MatmulRecipe

_CPU_INFO = Path("/proc/cpuinfo")
# Variables that MKL, oneDNN, OpenMP and torch choose kernels or threads by.
_ENVIRONMENT = ("MKL_", "ONEDNN_", "DNNL_", "OMP_", "KMP_", "ATEN_", "TORCH_")


class Recipes:
    """How to multiply with weights of a shape, by :func:`.invariant.choose_recipe`.

    Args:
        folder: where what was found is kept, None to keep it for this object alone. Nothing is kept
            where the processor does not say what it is.
    """

    def __init__(self, folder: Path | None = None) -> None:
        self._folder = folder
        self._file: Path | None = None
        self._known: dict[str, MatmulRecipe] = {}

    def choose(
        self,
        num_outputs: int,
        num_inputs: int,
        dtype: torch.dtype,
        *,
        is_contiguous: bool,
        may_pack: bool,
    ) -> MatmulRecipe:
        """As :func:`.invariant.choose_recipe`, tried out if it is not known yet."""
        if self._folder is not None:
            fingerprint = _fingerprint()
            if fingerprint is not None:
                self._file = self._folder / f"cpu-{fingerprint}.json"
                self._known |= _read(self._file)
            self._folder = None
        key = f"{num_outputs}x{num_inputs} {dtype} {is_contiguous:d}{may_pack:d}"
        if key not in self._known:
            self._known[key] = invariant.choose_recipe(
                num_outputs, num_inputs, dtype, is_contiguous=is_contiguous, may_pack=may_pack
            )
            if self._file is not None:
                with suppress(OSError):  # a full disk costs only the cache
                    write_whole(self._file, json.dumps(self._known).encode())
        return self._known[key]


def _fingerprint() -> str | None:
    """Of all that a trial's outcome depends on: processor, libraries and their settings, our code.
    None if the processor is not known."""
    try:
        # The first processor's lines; its clock changes all the time.
        lines = _CPU_INFO.read_text().partition("\n\n")[0].splitlines()
    except OSError:
        return None
    processor = [line for line in lines if not line.startswith("cpu MHz")]
    parts = [
        processor,
        platform.machine(),
        torch.__version__,
        torch.__config__.show(),
        torch.get_num_threads(),
        torch.backends.cpu.get_cpu_capability(),
        torch.backends.mkldnn.is_available(),
        torch.backends.mkldnn.enabled,  # type: ignore[attr-defined]
        torch.get_float32_matmul_precision(),
        sorted((k, v) for k, v in os.environ.items() if k.startswith(_ENVIRONMENT)),
    ]
    digest = hashlib.sha256(repr(parts).encode())
    for module in (invariant.__file__, __file__):
        digest.update(Path(module).read_bytes())
    return digest.hexdigest()[:24]


def _read(file: Path) -> dict[str, MatmulRecipe]:
    """What is there of the form that :class:`Recipes` writes."""
    try:
        found = json.loads(file.read_text())
        return {str(key): _recipe(*value) for key, value in found.items()}
    except (OSError, ValueError, TypeError, AttributeError):
        return {}


def _recipe(
    library: object, row_unit: object, tile: object, is_even: object, is_packed: object
) -> MatmulRecipe:
    """Raises ValueError unless the values are a recipe's."""
    if library not in ("mkl", "onednn") or type(row_unit) is not int or type(tile) is not int:
        raise ValueError("no recipe")
    if row_unit < 1 or tile < 0 or type(is_even) is not bool or type(is_packed) is not bool:
        raise ValueError("no recipe")
    return MatmulRecipe(library, row_unit, tile, is_even, is_packed)  # type: ignore[arg-type]
