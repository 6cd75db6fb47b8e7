"""Write checkpoints of a tiny model in the common quantised formats, with their dequantised values.

The encoders are written element by element in numpy from the descriptions of the formats. They
share no code with the loaders under test.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import PreTrainedModel

from tests.support.models import tiny_model

# Matrices of several blocks of 128, not all of them whole.
SIZES = {
    "hidden_size": 160,
    "intermediate_size": 320,
    "num_attention_heads": 5,
    "num_key_value_heads": 1,
    "head_dim": 32,
}
# Groups of 128 and of 32 inputs.
INT4_SIZES = SIZES | {"hidden_size": 256, "intermediate_size": 384, "num_attention_heads": 8}
Encoded = tuple[dict[str, Tensor], Tensor]
"""The tensors of a layer by the end of their names, and the weight they stand for."""


def e4m3_table() -> np.ndarray[Any, np.dtype[np.float64]]:
    """The values of all 256 bit patterns, from the format's formula."""
    table = np.zeros(256)
    for bits in range(256):
        exponent, fraction = bits >> 3 & 15, bits & 7
        size = 2.0 ** (max(exponent, 1) - 7) * ((exponent > 0) + fraction / 8)
        table[bits] = np.nan if bits & 127 == 127 else -size if bits & 128 else size
    return table


def nearest_e4m3(numbers: np.ndarray[Any, Any]) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """The bit patterns of the nearest values; ties go to the even pattern."""
    positive = e4m3_table()[:127]
    size = np.minimum(np.abs(numbers.astype(np.float64)), 448.0)
    above = np.clip(np.searchsorted(positive, size), 1, 126)
    low, high = size - positive[above - 1], positive[above] - size
    is_low = (low < high) | ((low == high) & ((above - 1) % 2 == 0))
    bits = np.where(is_low, above - 1, above)
    return (bits | np.where(np.signbit(numbers), 128, 0)).astype(np.uint8)


def _fp8(bits: np.ndarray[Any, Any]) -> Tensor:
    return torch.from_numpy(bits).view(torch.float8_e4m3fn)


def fp8_blocks(weight: Tensor) -> Encoded:
    whole = weight.double().numpy()
    num_outputs, num_inputs = whole.shape
    scales = np.zeros((-(-num_outputs // 128), -(-num_inputs // 128)), np.float32)
    bits, plain = np.zeros(whole.shape, np.uint8), np.zeros(whole.shape, np.float32)
    for i in range(scales.shape[0]):
        for j in range(scales.shape[1]):
            at = np.s_[i * 128 : (i + 1) * 128, j * 128 : (j + 1) * 128]
            scales[i, j] = np.abs(whole[at]).max() / 448
            bits[at] = nearest_e4m3(whole[at].astype(np.float32) / scales[i, j])
            plain[at] = e4m3_table()[bits[at]].astype(np.float32) * scales[i, j]
    parts = {"weight": _fp8(bits), "weight_scale_inv": torch.from_numpy(scales)}
    return parts, torch.from_numpy(plain)


def fp8_rows(weight: Tensor, *, one_scale: bool = False) -> Encoded:
    whole = weight.double().numpy()
    largest = np.abs(whole).max(None if one_scale else 1, keepdims=True)
    scales = (largest / 448).astype(np.float32)
    bits = nearest_e4m3(whole / scales)
    plain = e4m3_table()[bits].astype(np.float32) * scales
    given = torch.from_numpy(scales.reshape(1) if one_scale else scales)
    return {"weight": _fp8(bits), "weight_scale": given}, torch.from_numpy(plain)


def fp8_tensor(weight: Tensor) -> Encoded:
    return fp8_rows(weight, one_scale=True)


class Int4:
    """Values 0 to 15 ``[N, K]``, zero points ``[N, G]`` and scales ``[N, G]``.

    Scales are bfloat16 values, and so are zero points times scales. So the values that kernels
    round to bfloat16 equal those computed here.
    """

    def __init__(
        self, weight: Tensor, group: int, *, symmetric: bool, extreme: bool = False
    ) -> None:
        whole = weight.double().numpy().reshape(len(weight), -1, group)
        low, high = np.minimum(whole.min(2), -1e-6), np.maximum(whole.max(2), 1e-6)
        self.zeros = np.full(low.shape, 8)
        if not symmetric:
            allowed = np.array([4, 6, 7, 8, 9, 10, 12])
            ideal = 15 * low / (low - high)
            self.zeros = allowed[np.abs(ideal[..., None] - allowed).argmin(-1)]
        scales = np.maximum(high / (15 - self.zeros), -low / self.zeros)
        if extreme:
            # Three in eight are 0, and one in four is 15.
            random = np.random.default_rng(weight.numel())
            self.zeros = np.where(random.random(low.shape) < 0.5, self.zeros, 0)
            self.zeros = np.where(random.random(low.shape) < 0.25, 15, self.zeros)
            scales = (high - low) / 15
        self.scales = torch.from_numpy(scales).bfloat16().float().numpy()
        values = np.rint(whole / self.scales[..., None]) + self.zeros[..., None]
        values = np.clip(values, 0, 15).astype(np.int64)
        plain = (values - self.zeros[..., None]) * self.scales[..., None]
        self.plain = torch.from_numpy(plain.reshape(weight.shape).astype(np.float32))
        self.values = values.reshape(weight.shape)


def _words(nibbles: np.ndarray[Any, Any]) -> Tensor:
    """Pack ``[.., 8]`` into int32 ``[..]``, the first value in the lowest bits."""
    words = sum(nibbles[..., i].astype(np.uint32) << np.uint32(4 * i) for i in range(8))
    return torch.from_numpy(np.ascontiguousarray(words).view(np.int32).copy())


def awq(weight: Tensor, group: int = 128) -> Encoded:
    made = Int4(weight, group, symmetric=False)

    def packed(columns: np.ndarray[Any, Any]) -> Tensor:
        eights = columns.reshape(len(columns), -1, 8)
        return _words(eights[..., [0, 2, 4, 6, 1, 3, 5, 7]])

    parts = {"qweight": packed(made.values.T), "qzeros": packed(made.zeros.T)}
    scales = torch.from_numpy(np.ascontiguousarray(made.scales.T))
    return {**parts, "scales": scales.bfloat16()}, made.plain


class SortedInt4(Int4):
    """Groups of inputs chosen at random over the whole width: ``groups`` ``[K]``."""

    def __init__(self, weight: Tensor, group: int, seed: int, *, symmetric: bool) -> None:
        order = np.random.default_rng(seed).permutation(weight.shape[1])
        super().__init__(weight[:, torch.from_numpy(order)], group, symmetric=symmetric)
        place = np.argsort(order)
        self.values, self.plain = self.values[:, place], self.plain[:, torch.from_numpy(place)]
        self.groups = torch.from_numpy(place // group).int()


def gptq(
    weight: Tensor,
    group: int = 128,
    *,
    symmetric: bool = True,
    second_format: bool = False,
    is_sorted: bool = False,
    extreme: bool = False,
) -> Encoded:
    num_outputs, num_inputs = weight.shape
    groups = torch.arange(num_inputs, dtype=torch.int32) // group
    if is_sorted:
        made: Int4 = (sorted_one := SortedInt4(weight, group, num_inputs, symmetric=symmetric))
        groups = sorted_one.groups
    else:
        made = Int4(weight, group, symmetric=symmetric, extreme=extreme)
    rows = made.values.T.reshape(num_inputs // 8, 8, num_outputs).transpose(0, 2, 1)
    stored = _words(made.zeros.T.reshape(made.zeros.shape[1], -1, 8)).numpy().view(np.uint32)
    # The first format subtracts from whole words: a zero point of 0 borrows from the next one.
    stored = stored - np.uint32(0 if second_format else 0x11111111)
    parts = {
        "qweight": _words(rows),
        "qzeros": torch.from_numpy(stored.view(np.int32)),
        "scales": torch.from_numpy(np.ascontiguousarray(made.scales.T)).bfloat16(),
        "g_idx": groups,
    }
    return parts, made.plain


def packed_int4(
    weight: Tensor, group: int = 128, *, symmetric: bool = True, is_sorted: bool = False
) -> Encoded:
    num_outputs, num_inputs = weight.shape
    parts: dict[str, Tensor] = {}
    if is_sorted:
        # Queries have another order than keys and values.
        seed = num_outputs + num_inputs
        made: Int4 = (sorted_one := SortedInt4(weight, group, seed, symmetric=symmetric))
        parts["weight_g_idx"] = sorted_one.groups
    else:
        made = Int4(weight, group, symmetric=symmetric)
    parts |= {
        "weight_packed": _words(made.values.reshape(num_outputs, -1, 8)),
        "weight_scale": torch.from_numpy(made.scales).bfloat16(),
        "weight_shape": torch.tensor([num_outputs, num_inputs]),
    }
    if not symmetric:
        zeros = made.zeros.reshape(num_outputs // 8, 8, -1).transpose(0, 2, 1)
        parts["weight_zero_point"] = _words(zeros)
    return parts, made.plain


def compressed(format: str, weights: dict[str, Any], activations: object) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": weights, "input_activations": activations}
    return {
        "quant_method": "compressed-tensors",
        "format": format,
        "config_groups": {"group_0": group},
        "ignore": ["lm_head", "re:.*layers.1.mlp.down_proj"],
    }


_FLOAT8 = {"num_bits": 8, "type": "float", "symmetric": True, "dynamic": False}
_PER_TOKEN = {"num_bits": 8, "type": "float", "strategy": "token", "dynamic": True}
_INT4 = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 128}
LEFT = ("lm_head", "model.layers.1.mlp.down_proj")
FP8_CONFIG = {
    "quant_method": "fp8",
    "activation_scheme": "dynamic",
    "weight_block_size": [128, 128],
    "modules_to_not_convert": list(LEFT),
}
AWQ_CONFIG = {
    "quant_method": "awq",
    "bits": 4,
    "group_size": 128,
    "zero_point": True,
    "version": "gemm",
    "modules_to_not_convert": list(LEFT),
}
GPTQ_CONFIG = {"quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": False}
LAYOUTS: dict[str, tuple[dict[str, Any], Callable[[Tensor], Encoded]]] = {
    "fp8 blocks": (FP8_CONFIG, fp8_blocks),
    "fp8 channels": (
        compressed("float-quantized", {**_FLOAT8, "strategy": "channel"}, _PER_TOKEN),
        fp8_rows,
    ),
    "fp8 tensors": (
        compressed("float-quantized", {**_FLOAT8, "strategy": "tensor"}, _PER_TOKEN),
        fp8_tensor,
    ),
    "awq": (AWQ_CONFIG, awq),
    "gptq": ({**GPTQ_CONFIG, "sym": True}, gptq),
    "gptq asymmetric": (
        {**GPTQ_CONFIG, "sym": False, "checkpoint_format": "gptq_v2"},
        lambda weight: gptq(weight, symmetric=False, second_format=True),
    ),
    "gptq extreme zeros": (
        {**GPTQ_CONFIG, "sym": False, "checkpoint_format": "gptq"},
        lambda weight: gptq(weight, symmetric=False, extreme=True),
    ),
    "packed int4": (
        compressed("pack-quantized", {**_INT4, "symmetric": True}, None),
        packed_int4,
    ),
    "packed int4 asymmetric": (
        compressed("pack-quantized", {**_INT4, "symmetric": False}, None),
        lambda weight: packed_int4(weight, symmetric=False),
    ),
    "gptq sorted": (
        {**GPTQ_CONFIG, "desc_act": True, "sym": False},
        lambda weight: gptq(weight, symmetric=False, is_sorted=True),
    ),
    "packed int4 sorted": (
        compressed("pack-quantized", {**_INT4, "symmetric": True, "actorder": "group"}, None),
        lambda weight: packed_int4(weight, is_sorted=True),
    ),
}
INT4_LAYOUTS = [name for name in LAYOUTS if not name.startswith("fp8")]


def left_in(layout: str) -> tuple[str, ...]:
    """Layers that a checkpoint leaves unquantised. GPTQ's config has no list of them."""
    return LEFT if "gptq" not in layout else LEFT[:1]


def write_quantized(folder: Path, layout: str, seed: int = 0, **overrides: Any) -> PreTrainedModel:
    """Write a checkpoint to ``folder`` and return its dequantised model, in float32."""
    config, encode = LAYOUTS[layout]
    sizes = INT4_SIZES if layout in INT4_LAYOUTS else SIZES
    model = tiny_model("llama", seed, **(sizes | overrides))
    tensors: dict[str, Tensor] = {}
    for name, parameter in model.named_parameters():
        layer = name.removesuffix(".weight")
        if "proj" not in name or layer in left_in(layout):
            tensors[name] = parameter.detach().clone()
            continue
        parts, plain = encode(parameter.detach())
        tensors |= {f"{layer}.{end}": part.contiguous() for end, part in parts.items()}
        with torch.no_grad():
            parameter.copy_(plain)
    write_checkpoint(folder, model, tensors, config)
    return model


def write_checkpoint(
    folder: Path, model: PreTrainedModel, tensors: dict[str, Tensor], config: dict[str, Any] | None
) -> None:
    model.config.save_pretrained(folder)
    if config is not None:
        path = folder / "config.json"
        written = json.loads(path.read_text()) | {"quantization_config": config}
        path.write_text(json.dumps(written))
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


def write_mxfp4(folder: Path, model: PreTrainedModel) -> None:
    """A checkpoint whose experts are random e2m1 values, each 32 with one power of two as scale."""
    model.save_pretrained(folder)
    tensors = load_file(folder / "model.safetensors")
    generator = torch.Generator().manual_seed(0)
    for name in [name for name in tensors if name.endswith(("gate_up_proj", "down_proj"))]:
        num_experts, num_inputs, num_outputs = tensors.pop(name).shape
        shape = num_experts, num_outputs, num_inputs // 32
        blocks = torch.randint(0, 256, (*shape, 16), dtype=torch.uint8, generator=generator)
        scales = torch.randint(120, 124, shape, dtype=torch.uint8, generator=generator)
        tensors |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": []}
    (folder / "config.json").write_text(json.dumps(config))
