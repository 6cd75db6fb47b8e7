"""The names of a GGUF file's tensors, by transformers' own table and conversions.

A new value has the form of the file: the bytes of its blocks (uint8, ``[N, bytes]``), or float
elements if the model stores the tensor dequantised. transformers' processor of the architecture
then orders rows as it does when the file is converted.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import AutoConfig
from transformers.modeling_gguf_pytorch_utils import (
    Qwen2MoeTensorProcessor,
    TensorProcessor,
    get_gguf_hf_weights_map,
)

from ...kernels.matmul.quantized.quantized_weight import QuantizedWeight
from ..weights import Changes, Region, check_value, refused
from .build_module import skeleton_of
from .gguf_blocks import blocks_of, in_order
from .gguf_check import processor_of
from .gguf_vocabulary import open_gguf, quick_gguf
from .weight_names import aliases_of

_EXPERTS = {"gate": 0, "up": 1, "down": 0}
"""The half of the parameter that the matrices of all experts fill."""


class GgufNames:
    """The names of a GGUF file and its conversion.

    Args:
        name, files: see :class:`.ModelSource`.
    """

    ties: Sequence[Sequence[str]] = ()

    def __init__(self, name: str, files: str) -> None:
        self._name = name
        reader = open_gguf(Path(name))
        self._tensors = {tensor.name: tensor for tensor in reader.tensors}
        config = AutoConfig.from_pretrained(files, trust_remote_code=False)
        skeleton = skeleton_of(config)
        self._processor: TensorProcessor = processor_of(reader, config)
        with quick_gguf():
            self._parameters: dict[str, str] = get_gguf_hf_weights_map(skeleton, self._processor)
        self._shapes = {n: t.shape for n, t in skeleton.state_dict().items()}
        self._aliases = aliases_of(skeleton)

    @property
    def names(self) -> Sequence[str]:
        return list(self._tensors)

    def regions(self, name: str) -> Sequence[Region]:
        if name not in self._tensors:
            raise refused(name, f"is no tensor of {self._name}")
        part = self._expert_part(name)
        # The table has the matrices of experts without the suffix of their names.
        key = name if part is None else name.removesuffix(".weight")
        parameter = self._parameters.get(key, self._parameters.get(name))
        if parameter is None or parameter not in self._shapes:
            raise refused(name, "is not read by the model")
        shape, own = self._shapes[parameter], self._shape(name)
        region = Region.whole(parameter, shape)
        if part is not None and own != shape:
            begin = (0, _EXPERTS[part] * own[1], 0)
            region = replace(region, begin=begin, sizes=tuple(own))
        elif own.numel() != shape.numel():
            raise refused(name, f"has shape {tuple(own)}, and {parameter} {tuple(shape)}")
        if part is None and type(self._processor) is not TensorProcessor:
            region = replace(region, notes=(type(self._processor).__name__,))
        names = self._aliases.get(parameter, [parameter])
        return [replace(region, parameter=alias) for alias in names]

    def changes(self, values: Mapping[str, Tensor], held: Mapping[str, Any]) -> Changes:
        regions: list[tuple[Region, Tensor]] = []
        quantized: dict[str, QuantizedWeight] = {}
        for name, value in values.items():
            boxes = self.regions(name)
            value = value.cpu()
            converted = self._converted(name, self._floats(name, value))
            is_held = any(box.parameter in held for box in boxes)
            blocks = self._blocks(name, value, converted) if is_held else None
            if blocks is not None:
                quantized |= {box.parameter: blocks for box in boxes}
            regions += [(box, converted) for box in boxes]
        return Changes(regions, quantized)

    def _shape(self, name: str) -> torch.Size:
        return torch.Size(int(size) for size in reversed(self._tensors[name].shape))

    def _expert_part(self, name: str) -> str | None:
        """Which matrices of experts the tensor contains, for an architecture whose files store them
        separately."""
        if not isinstance(self._processor, Qwen2MoeTensorProcessor):
            return None
        found = self._processor.GGUF_MOE_WEIGHTS_PATTERN.fullmatch(name)
        return None if found is None else str(found["w"])

    def _floats(self, name: str, value: Tensor) -> Tensor:
        """The elements of a tensor, as the conversion reads them."""
        from gguf.quants import dequantize

        tensor = self._tensors[name]
        if value.dtype == torch.uint8 and tensor.data.dtype == np.uint8:
            check_value(name, value, torch.empty(tensor.data.shape, dtype=torch.uint8))
            return torch.from_numpy(dequantize(value.numpy(), tensor.tensor_type))
        check_value(name, value, torch.empty(self._shape(name), device="meta"))
        return value.float()

    def _blocks(self, name: str, value: Tensor, converted: Tensor) -> QuantizedWeight | None:
        tensor = self._tensors[name]
        kind: str = tensor.tensor_type.name
        if value.dtype != torch.uint8 or tensor.data.dtype != np.uint8:
            raise refused(name, f"is held in blocks of the file: give them, of {kind}, as uint8")
        blocks = blocks_of(value.numpy(), kind)
        held = None if blocks is None else in_order(blocks, converted)
        if blocks is not None and held is None:
            raise refused(name, "is converted in a way that does not keep rows")
        return held

    def _converted(self, name: str, value: Tensor) -> Tensor:
        """The tensor as transformers converts it."""
        if self._expert_part(name) is not None:
            return value
        result = self._processor.process(
            weights=value.numpy(),
            name=name,
            tensor_key_mapping=self._parameters,
            parsed_parameters={"tensors": {}},
        )
        if result.name != name:
            raise refused(name, f"is converted by {type(self._processor).__name__}: not followed")
        return torch.from_numpy(np.copy(result.weights))
