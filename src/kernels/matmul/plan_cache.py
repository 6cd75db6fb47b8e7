"""Disk cache of the matmul plans: own kernel or cuBLAS, determined once per shape by comparing
bits."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

import torch
from torch import Tensor

from ...disk_cache import write_whole
from ..jit.parallel_build import parallel_build
from . import dispatch as gpu_linear
from . import plan
from .tiles import has_one_tile


class LinearPlans:
    """Per weight shape, the largest row count at which the own kernel computes a matmul.

    Args:
        transparent: True sweeps each shape and chooses the kernels that keep a row's bits for all
            row counts. False chooses the kernels that were measured to be fast.
        folder: where sweeps are kept; None keeps none. A sweep holds for the settings in effect in
            its process (:mod:`.cublas`), so a folder is for processes that make these settings.
    """

    def __init__(self, transparent: bool, folder: Path | None = None) -> None:
        self.transparent = transparent
        self._folder = folder
        self._few_rows: dict[str, int] = {}
        self._file: Path | None = None

    def max_custom_rows(self, weight: Tensor, bias: Tensor | None, has_gate: bool) -> int:
        """The value for the matmul with ``weight [N, K]`` and ``bias [N]`` or None. ``has_gate``:
        whether they contain gate and up, joined by their activation."""
        if not self.transparent:
            return plan.rows_worth_it(weight, has_gate)
        key = _key(weight, bias, has_gate)
        if key not in self._kept(weight.device):
            self._few_rows[key] = plan.choose_plan(weight, bias, has_gate)
            if self._file is not None:
                _write(self._file, self._few_rows)
        return self._few_rows[key]

    def prepare(self, matmuls: Iterable[tuple[Tensor, Tensor | None, bool]]) -> None:
        """Compile in parallel all kernels that the sweeps will launch. Elements are (weight, bias,
        whether they contain gate and up)."""
        if not self.transparent:
            return
        new: dict[str, tuple[Tensor, Tensor | None, bool]] = {}
        for matmul in matmuls:
            weight = matmul[0]
            if not has_one_tile(weight.shape[1], weight.itemsize):
                new.setdefault(_key(*matmul), matmul)
        if not new:
            return
        device = next(iter(new.values()))[0].device
        for key in new.keys() & self._kept(device).keys():
            del new[key]
        with torch.inference_mode(), parallel_build(device):
            for weight, bias, has_gate in new.values():
                most = plan.rows_worth_it(weight, has_gate)
                if len(weight) < plan.LEAST_OUTPUTS:
                    most = plan.SWEEP_ROWS[-1]
                for count in (c for c in plan.SWEEP_ROWS if c <= most):
                    x = weight.new_empty(count, weight.shape[1])
                    gpu_linear.linear(x, weight, bias, gpu_linear.ALL_ROWS)
                plan.many_differs(weight, bias, has_gate)  # the result is not used

    def _kept(self, device: torch.device) -> dict[str, int]:
        if self._file is None and self._folder is not None:
            self._file = self._folder / f"{_fingerprint(device)}.json"
            self._few_rows |= _read(self._file)
        return self._few_rows


def _key(weight: Tensor, bias: Tensor | None, has_gate: bool) -> str:
    kind = ("bias" if bias is not None else "plain") + (" gate" if has_gate else "")
    return f"{weight.shape[0]}x{weight.shape[1]} {weight.dtype} {kind}"


def _fingerprint(device: torch.device) -> str:
    """A digest of everything that a sweep depends on: GPU, libraries, own kernels."""
    import triton

    digest = hashlib.sha256()
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    for part in (name, torch.__version__, torch.version.cuda, triton.__version__):
        digest.update(f"{part}\n".encode())
    for name in (
        "dispatch",
        "plan",
        "tiles",
        "tuned_tiles",
        "matmul",
        "sm90/matmul_sm90",
        "sm90/matmul_sm90_many",
    ):
        digest.update((Path(gpu_linear.__file__).parent / f"{name}.py").read_bytes())
    return digest.hexdigest()[:24]


def _read(file: Path) -> dict[str, int]:
    try:
        found = json.loads(file.read_text())
    except (OSError, ValueError):
        return {}
    if not isinstance(found, dict):
        return {}
    return {str(k): v for k, v in found.items() if isinstance(v, int) and v >= 0}


def _write(file: Path, max_custom_rows: dict[str, int]) -> None:
    with suppress(OSError):  # a full disk costs only the cache
        write_whole(file, json.dumps(max_custom_rows).encode())
