"""Refuses a model whose weights do not fit the memory, before they are loaded."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch

from ..compile.load.checkpoint import weight_files
from ..compile.load.drafters import MODEL_KEY
from ..compile.load.gguf_vocabulary import open_gguf
from ..compile.load.load import dtype_of, read_config
from ..compile.load.quantized_drafter import QUANTIZATION_KEY
from ..compile.load.quantized_load import quantization_of, stays_quantised
from ..compile.load.source import ModelSource, find_source
from ..compile.model.loaded import LoadedModel
from ..engine.config import EngineConfig
from ..errors import InvalidInputError
from .host_memory import available_bytes

GIB = 1 << 30
_MAX_BYTES_PER_ELEMENT = 4  # float32
_FLOATS = frozenset(("F64", "F32", "F16", "BF16", "F8_E4M3", "F8_E5M2"))
_MAX_ELEMENTS_PER_BYTE = 8
_NUM_COPIES_IN_CONVERSION = 2


class Need(NamedTuple):
    """A lower bound of the memory for a model's weights.

    Attributes:
        num_bytes: the bound. form: dtype or format of the weights, for errors.
    """

    num_bytes: int
    form: str


def check_weights_fit(
    source: ModelSource,
    config: EngineConfig,
    devices: list[torch.device],
    field: str = "model",
) -> None:
    """Compare the weights with the memory that is free on the devices.

    Args:
        devices: of all ranks. field: names the model in a refusal.

    Raises:
        InvalidInputError: the weights certainly do not fit.
    """
    if config.quantization == "gguf":
        return  # the float32 conversion stays mapped from the file; blocks are read one by one
    is_cpu = devices[0].type == "cpu"
    # Of the first GPU: a query of another one would create a CUDA context there.
    free, place = _free_bytes(devices[0])
    is_dummy = config.load_format == "dummy"
    if not is_dummy and (upper := _max_bytes(source)) is not None and upper <= free:
        return
    need = _need_of(source, config, devices)
    if need is None:
        return
    num_bytes = need.num_bytes
    if not is_cpu:  # each rank has its slices alone
        num_bytes = -(-num_bytes // len(devices))
    if num_bytes > free:
        whose = "its weights" if len(devices) == 1 or is_cpu else "the weights of one rank"
        raise InvalidInputError(
            field,
            source.name,
            f"{whose} take {num_bytes / GIB:.1f} GiB in {need.form}, more than the "
            f"{free / GIB:.1f} GiB {place}; use a smaller model, a smaller dtype, quantization or "
            "more GPUs",
        )


def check_drafter_fits(config: EngineConfig, target: LoadedModel) -> None:
    """Compare the weights of a drafter with the memory that its loaded target left: those of a
    second model, or the FP8 copy of the target's head.

    Raises:
        InvalidInputError: the weights certainly do not fit.
    """
    drafts = config.speculation
    if drafts is None or not drafts.has_model:
        return
    if drafts.method == "draft_model" and drafts.model is not None:
        own = replace(config, quantization=drafts.quantization)
        check_weights_fit(find_source(drafts.model), own, [target.device], MODEL_KEY)
    elif drafts.method == "mtp" and drafts.quantization is not None:
        hidden_size = target.config.get_text_config(decoder=True).hidden_size
        num_bytes, (free, place) = target.vocab_size * hidden_size, _free_bytes(target.device)
        if num_bytes > free:
            raise InvalidInputError(
                QUANTIZATION_KEY,
                drafts.quantization,
                f"the drafter's copy of the head takes {num_bytes / GIB:.1f} GiB, more than the "
                f"{free / GIB:.1f} GiB {place}; leave it out or use a smaller model",
            )


def check_conversion_fits(path: Path) -> None:
    """Compare a GGUF file with the memory that its conversion to float32 takes.

    Raises:
        InvalidInputError: the conversion certainly does not fit.
    """
    num_elements = sum(int(tensor.n_elements) for tensor in open_gguf(path).tensors)
    num_bytes, free = _NUM_COPIES_IN_CONVERSION * 4 * num_elements, available_bytes()
    if num_bytes > free:
        raise InvalidInputError(
            "model",
            str(path),
            f"its conversion to float32 takes {num_bytes / GIB:.1f} GiB, more than the "
            f"{free / GIB:.1f} GiB available; use a smaller model",
        )


def _free_bytes(device: torch.device) -> tuple[int, str]:
    """Free bytes of a device, and their name for errors."""
    if device.type == "cpu":
        return available_bytes(), "available"
    return torch.cuda.mem_get_info(device)[0], f"free on {device}"


def _max_bytes(source: ModelSource) -> int | None:
    """An upper bound of the weights' bytes, as float32; None if the files are not on the disk."""
    tensors = _tensors(source)
    if tensors is None:
        return None
    return sum(
        count * (_MAX_BYTES_PER_ELEMENT * (1 if dtype in _FLOATS else _MAX_ELEMENTS_PER_BYTE))
        for dtype, count in tensors
    )


def _tensors(source: ModelSource) -> list[tuple[str, int]] | None:
    """Dtype and number of elements of each tensor of the files; None if files are missing or
    damaged, which loading reports."""
    try:
        files = weight_files(source.files)
        return None if files is None else [each for file in files for each in _header(file)]
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


def _header(file: Path) -> Iterable[tuple[str, int]]:
    with file.open("rb") as opened:
        size = int.from_bytes(opened.read(8), "little")
        if size > file.stat().st_size:
            raise ValueError(f"{file} is damaged")
        header: dict[str, Any] = json.loads(opened.read(size))
    header.pop("__metadata__", None)
    return [(entry["dtype"], math.prod(entry["shape"])) for entry in header.values()]


def _need_of(source: ModelSource, config: EngineConfig, devices: list[torch.device]) -> Need | None:
    """A lower bound of what loading allocates; None for weights that stay mapped from the files,
    as those of one rank may."""
    from ..compile.load.build_module import skeleton_of

    device = devices[0]
    hf_config = read_config(source)
    dtype = dtype_of(hf_config, config.dtype, device)
    stays = config.load_format == "auto" and stays_quantised(hf_config)
    may_map = device.type == "cpu" and len(devices) == 1
    if may_map and config.load_format == "auto" and not stays:
        names = {"torch.float32": "F32", "torch.bfloat16": "BF16", "torch.float16": "F16"}
        tensors = _tensors(source)
        if tensors is None or {kind for kind, _ in tensors} & {*_FLOATS} <= {names[str(dtype)]}:
            return None
    try:
        skeleton = skeleton_of(hf_config)
    except (ValueError, ImportError, OSError):
        return None  # loading reports it
    num_elements = sum(parameter.numel() for parameter in skeleton.parameters())
    if config.quantization == "fp8" or stays:
        method = (quantization_of(hf_config) or {}).get("quant_method", "fp8")
        if method == "fp8":
            return Need(num_elements, "fp8")
        return Need(num_elements // 2, "4 bits")
    return Need(num_elements * dtype.itemsize, str(dtype).removeprefix("torch."))
