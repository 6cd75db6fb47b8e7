"""Disk cache of the recipes of CPU matmuls. Trials (:mod:`.invariant` and others) run once per
shape, processor, library and set of thread counts."""

from __future__ import annotations

import hashlib
import json
import os
import platform
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple, TypeVar, get_args

import torch

from ....disk_cache import write_whole
from . import invariant
from .invariant import Library, MatmulRecipe

_CPU_INFO = Path("/proc/cpuinfo")
# Environment variables by which MKL, oneDNN, OpenMP and torch choose kernels or threads.
_ENVIRONMENT = ("MKL_", "ONEDNN_", "DNNL_", "OMP_", "KMP_", "ATEN_", "TORCH_")
_KERNELS = Path(__file__).parents[2]
# Modules that run in trials, or that trials test.
_SOURCES = (
    *("fixed_order.py", "row_trial.py", "matmul/cpu/invariant.py", "matmul/cpu/recipe_cache.py"),
    *("mla/head_matmul.py", "attention/cpu_invariant.py", "attention/cpu_trial.py"),
)
_Recipe = TypeVar("_Recipe", bound="NamedTuple")


class Recipes:
    """Recipes for weights of a shape, from trials.

    Args:
        folder: where recipes are kept; None keeps them in this object only. Nothing is stored if
            the processor cannot be identified.
        threads: numbers of threads that recipes may be used with, largest first; empty: only the
            present number.
    """

    def __init__(self, folder: Path | None = None, threads: Sequence[int] = ()) -> None:
        self._folder = folder
        self._threads = tuple(threads)
        self._file: Path | None = None
        self._known: dict[str, tuple[Any, ...]] = {}

    def choose(
        self,
        num_outputs: int,
        num_inputs: int,
        dtype: torch.dtype,
        *,
        is_contiguous: bool,
        may_pack: bool,
    ) -> MatmulRecipe:
        """Same as :func:`.invariant.choose_recipe`, with a trial if the recipe is not cached."""
        return self.find(
            MatmulRecipe("mkl", 1),
            f"{num_outputs}x{num_inputs} {dtype} {is_contiguous:d}{may_pack:d}",
            lambda: invariant.choose_recipe(
                num_outputs,
                num_inputs,
                dtype,
                is_contiguous=is_contiguous,
                may_pack=may_pack,
                threads=self._threads,
            ),
        )

    def find(self, sample: _Recipe, key: str, choose: Callable[[], _Recipe]) -> _Recipe:
        """The result of ``choose``, or the cached one for this key.

        Args:
            sample: any recipe of the kind: a named tuple of strings, integers and booleans.
        """
        if self._folder is not None:
            fingerprint = _fingerprint(self._threads or (torch.get_num_threads(),))
            if fingerprint is not None:
                self._file = self._folder / f"cpu-{fingerprint}.json"
                self._known |= _read(self._file)
            self._folder = None
        fields = self._known.get(key)
        if fields is not None and _are_fields(sample, fields):
            return type(sample)(*fields)
        recipe = choose()
        self._known[key] = tuple(recipe)
        if self._file is not None:
            with suppress(OSError):  # a full disk costs only the cache
                write_whole(self._file, json.dumps(self._known).encode())
        return recipe


def _fingerprint(threads: tuple[int, ...]) -> str | None:
    """A digest of everything that a trial's outcome depends on: processor, numbers of threads,
    libraries and their settings, this code. None if the processor is unknown."""
    try:
        # The lines of the first processor. Its clock changes all the time.
        lines = _CPU_INFO.read_text().partition("\n\n")[0].splitlines()
    except OSError:
        return None
    processor = [line for line in lines if not line.startswith("cpu MHz")]
    parts = [
        processor,
        platform.machine(),
        torch.__version__,
        torch.__config__.show(),
        threads,
        torch.backends.cpu.get_cpu_capability(),
        torch.backends.mkldnn.is_available(),
        torch.backends.mkldnn.enabled,  # type: ignore[attr-defined]
        torch.get_float32_matmul_precision(),
        sorted((k, v) for k, v in os.environ.items() if k.startswith(_ENVIRONMENT)),
    ]
    digest = hashlib.sha256(repr(parts).encode())
    for name in _SOURCES:
        digest.update((_KERNELS / name).read_bytes())
    return digest.hexdigest()[:24]


def _read(file: Path) -> dict[str, tuple[Any, ...]]:
    """A stored recipe, if the file has the format that :class:`Recipes` writes."""
    try:
        found = json.loads(file.read_text())
        return {str(key): tuple(value) for key, value in found.items()}
    except (OSError, ValueError, TypeError, AttributeError):
        return {}


def _are_fields(sample: NamedTuple, fields: tuple[Any, ...]) -> bool:
    """Whether a file's values are valid for such a recipe: correct types, and units of 1 or
    more."""
    if len(fields) != len(sample):
        return False
    for name, value, known in zip(sample._fields, fields, sample, strict=True):
        if type(value) is not type(known):
            return False
        if isinstance(value, str) and value not in get_args(Library):
            return False
        if type(value) is int and value < (0 if name == "tile" else 1):
            return False
    return True
