"""``Scheme``: a format in which a checkpoint stores its linear layers quantised.

The config of a checkpoint selects a scheme. The scheme names the tensors of a layer, and reads them
into a :class:`.QuantizedWeight`. Unsupported settings of a config are refused by name: an ignored
scale or permutation would change tokens without an error.

Does not import transformers: a restored start works without it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ...errors import InvalidInputError, UnsupportedModelError
from ...kernels import e4m3
from ...kernels.matmul.quantized.quantized_weight import (
    BLOCK,
    Fp8Weight,
    QuantizedWeight,
    quantize_fp8,
    rows_of_blocks,
)
from .checkpoint import Checkpoint, check_float, form_of
from .int4_layouts import AWQ, GPTQ, GPTQ_V2, PACKED

Parts = Mapping[str, Tensor]
"""The tensors of a layer, by the suffix of their names."""


@dataclass(frozen=True, slots=True)
class Scheme:
    """A quantisation format of layers in checkpoints.

    Attributes:
        name: for messages and statistics.
        format: of its weights (:attr:`.QuantizedWeight.format`).
        marker: a tensor that only quantised layers have.
        parts: the tensors of a quantised layer, without "bias"; those with "?" may be missing.
        read: the weight from its parts and its shape ``(N, K)``. Raises ValueError with the reason
            if they are wrong.
        is_excluded: whether the config excludes the layer of this name from quantisation.
    """

    name: str
    format: str
    marker: str
    parts: tuple[str, ...]
    read: Callable[[Parts, tuple[int, int]], QuantizedWeight]
    is_excluded: Callable[[str], bool] = lambda _: False

    @property
    def known(self) -> list[str]:
        """All tensors that a layer may have, without "bias"."""
        return [part.removesuffix("?") for part in self.parts]

    def layers(
        self, names: Iterable[str], parameter: Callable[[str], str | None]
    ) -> Iterator[tuple[str, str, bool]]:
        """For each quantised layer of a checkpoint: its name there, its name in the module ("" if
        the module has none), and whether the config excludes it from quantisation.

        Args:
            names: of the checkpoint's tensors.
            parameter: maps a tensor to a parameter of the module (:class:`CheckpointNames`).
        """
        end = f".{self.marker}"
        for file in (name.removesuffix(end) for name in names if name.endswith(end)):
            layer = (parameter(f"{file}.weight") or "").removesuffix(".weight")
            yield file, layer, self.is_excluded(layer) or self.is_excluded(file)

    def read_layer(self, layer: str, parts: Parts, shape: tuple[int, int]) -> QuantizedWeight:
        """The weight of a layer from its tensors.

        Raises:
            InvalidInputError: the tensors are not those of the scheme.
        """
        missing = [p for p in self.parts if not p.endswith("?") and p not in parts]
        if missing:
            raise InvalidInputError("model", layer, f"has no {', '.join(missing)}: {self.name}")
        try:
            return self.read(parts, shape)
        except ValueError as error:
            raise InvalidInputError("model", layer, f"{error}: {self.name}") from None

    def read_layers(
        self,
        checkpoint: Checkpoint,
        layers: Iterable[tuple[str, str, tuple[int, int]]],
        device: torch.device,
    ) -> Iterator[tuple[str, QuantizedWeight]]:
        """The weights of ``layers`` by parameter name, read one after the other to ``device``.

        Args:
            layers: for each, its name, its name in the checkpoint, and the shape of its weight.

        Raises:
            InvalidInputError: see :meth:`read_layer`.
        """
        for layer, file, shape in layers:
            parts = {
                part: checkpoint.get(f"{file}.{part}").to(device)
                for part in self.known
                if f"{file}.{part}" in checkpoint
            }
            yield f"{layer}.weight", self.read_layer(layer, parts, shape)


def saved_layers(
    folder: Path, layers: Iterable[tuple[str, tuple[int, int]]]
) -> Iterator[tuple[str, QuantizedWeight]]:
    """:meth:`Scheme.read_layers` for the checkpoint in a folder, by its config.json. A checkpoint
    that is not quantised is converted to FP8. Exclusions of the config are ignored. Layers must
    have the same names in the checkpoint.

    Args:
        layers: for each, its name and the shape ``(N, K)`` of its weight.

    Raises:
        Exception: of any type, if there is no such checkpoint.
    """
    named = [(layer, layer, shape) for layer, shape in layers]
    if not named:
        return iter(())
    found = json.loads((folder / "config.json").read_bytes()).get("quantization_config")
    scheme = fp8_at_load("") if found is None else scheme_of(str(folder), found)
    return scheme.read_layers(Checkpoint(folder), named, torch.device("cpu"))


def fp8_at_load(excluded: str) -> Scheme:
    """For a checkpoint that is not quantised: quantise all linear layers but the one of this
    name."""
    return Scheme(
        f"fp8 e4m3 in blocks of {BLOCK} x {BLOCK}, made at load",
        "fp8",
        "weight",
        ("weight",),
        _make_fp8,
        lambda layer: layer == excluded,
    )


def scheme_of(model: str, config: Mapping[str, Any]) -> Scheme:
    """The scheme of a ``quantization_config``.

    Raises:
        UnsupportedModelError: the scheme is unknown; the message names the unknown part.
    """
    method = config.get("quant_method")
    try:
        if not isinstance(method, str) or method not in _METHODS:
            raise _Unknown("quant_method", method, f"known are {', '.join(_METHODS)}")
        return _METHODS[method](config)
    except _Unknown as error:
        raise UnsupportedModelError(f"{model}: its quantization_config has {error}") from None


class _Unknown(Exception):
    def __init__(self, field: str, value: object, limit: str) -> None:
        super().__init__(f"{field} = {value!r}; {limit}")


def _expect(config: Mapping[str, Any], where: str, **expected: Sequence[object]) -> None:
    """Raise :class:`_Unknown` for a field that has none of the expected values."""
    for name, values in expected.items():
        if config.get(name) not in values:
            known = ", ".join(repr(value) for value in values)
            raise _Unknown(f"{where}{name}", config.get(name), f"known is {known}")


def _fp8(config: Mapping[str, Any]) -> Scheme:
    _expect(
        config,
        "",
        activation_scheme=("dynamic",),
        fmt=(None, "e4m3"),
        weight_block_size=([BLOCK, BLOCK], (BLOCK, BLOCK)),
    )

    def read(parts: Parts, shape: tuple[int, int]) -> Fp8Weight:
        num_blocks = tuple(-(-size // BLOCK) for size in shape)
        values, scales = _e4m3_bits(parts, shape), parts["weight_scale_inv"]
        check_float("weight_scale_inv", scales, num_blocks)
        return Fp8Weight(values, rows_of_blocks(scales, shape[0]))

    return Scheme(
        f"fp8 e4m3 in blocks of {BLOCK} x {BLOCK}",
        "fp8",
        "weight_scale_inv",
        ("weight", "weight_scale_inv"),
        read,
        _listed(config.get("modules_to_not_convert")),
    )


def _compressed_tensors(config: Mapping[str, Any]) -> Scheme:
    groups = config.get("config_groups") or {}
    if len(groups) != 1 or not isinstance(next(iter(groups.values())), Mapping):
        raise _Unknown("config_groups", groups, "only one explicit group is supported")
    [group] = groups.values()
    _expect(config, "", kv_cache_scheme=(None,), format=("float-quantized", "pack-quantized"))
    _expect(group, "", output_activations=(None,))
    sparsity = config.get("sparsity_config") or {}
    _expect(sparsity, "sparsity_config.", format=(None, "dense"))
    weights, activations = group.get("weights") or {}, group.get("input_activations")
    actorders = (None, "static", "weight", "group", True, False)
    _expect(weights, "weights.", actorder=actorders)
    targets, ignored = group.get("targets") or (), config.get("ignore") or ()

    def is_excluded(name: str) -> bool:
        is_target = "Linear" in targets or any(_matches(name, t) for t in targets)
        return not is_target or any(_matches(name, entry) for entry in ignored)

    if config["format"] == "float-quantized":
        _expect(weights, "weights.", num_bits=(8,), type=("float",), symmetric=(True, None))
        _expect(weights, "weights.", strategy=("channel", "tensor"), dynamic=(False, None))
        if activations is not None:
            where = "input_activations."
            _expect(activations, where, num_bits=(8,), type=("float",), dynamic=(True,))
            _expect(activations, where, strategy=("token",))
        return Scheme(
            f"fp8 e4m3 with a scale for each {weights['strategy']}",
            "fp8",
            "weight_scale",
            ("weight", "weight_scale"),
            _read_fp8_rows,
            is_excluded,
        )
    _expect({"input_activations": activations}, "", input_activations=(None,))
    _expect(weights, "weights.", num_bits=(4,), type=("int",), dynamic=(False, None))
    _expect(weights, "weights.", strategy=("group", "channel"))

    return Scheme(
        f"compressed-tensors int4 with a scale for each {weights['strategy']}",
        "int4",
        "weight_packed",
        ("weight_packed", "weight_scale", "weight_shape?", "weight_zero_point?", "weight_g_idx?"),
        PACKED.read,
        is_excluded,
    )


def _awq(config: Mapping[str, Any]) -> Scheme:
    _expect(config, "", bits=(4,), version=(None, "gemm", "GEMM"), zero_point=(None, True))

    name = f"AWQ int4 in groups of {config.get('group_size')}"
    excluded = _listed(config.get("modules_to_not_convert"))
    return Scheme(name, "int4", "qweight", ("qweight", "qzeros", "scales"), AWQ.read, excluded)


def _gptq(config: Mapping[str, Any]) -> Scheme:
    _expect(config, "", bits=(4,), checkpoint_format=(None, "gptq", "gptq_v2"), dynamic=(None, {}))
    name = f"GPTQ int4 in groups of {config.get('group_size')}"
    parts = ("qweight", "qzeros", "scales", "g_idx?")
    layout = GPTQ_V2 if config.get("checkpoint_format") == "gptq_v2" else GPTQ
    return Scheme(name, "int4", "qweight", parts, layout.read)


_METHODS: Mapping[str, Callable[[Mapping[str, Any]], Scheme]] = {
    "fp8": _fp8,
    "compressed-tensors": _compressed_tensors,
    "awq": _awq,
    "gptq": _gptq,
}
"""The schemes by ``quant_method``."""


def _make_fp8(parts: Parts, shape: tuple[int, int]) -> Fp8Weight:
    check_float("weight", parts["weight"], shape)
    return quantize_fp8(parts["weight"])


def _read_fp8_rows(parts: Parts, shape: tuple[int, int]) -> Fp8Weight:
    values, scales = _e4m3_bits(parts, shape), parts["weight_scale"]
    check_float("weight_scale", scales)
    if scales.numel() not in (1, shape[0]):
        raise ValueError(f"weight_scale has {scales.numel()} elements for {shape[0]} outputs")
    return Fp8Weight(values, scales.float().reshape(-1, 1).expand(shape[0], 1).contiguous())


def _e4m3_bits(parts: Parts, shape: tuple[int, int]) -> Tensor:
    weight = parts["weight"]
    if weight.dtype != torch.float8_e4m3fn or tuple(weight.shape) != shape:
        raise ValueError(f"weight is {form_of(weight)}, not float8_e4m3fn {shape}")
    bits = weight.view(torch.uint8)
    if e4m3.has_nan(bits):
        raise ValueError("weight has NaN")
    return bits


def _matches(name: str, entry: str) -> bool:
    """Matches as in compressed-tensors: an expression after "re:", or the name."""
    if entry.startswith("re:"):
        return re.match(entry.removeprefix("re:"), name) is not None
    return name == entry


def _listed(entries: Sequence[str] | None) -> Callable[[str], bool]:
    """Whether a name equals, is within, or ends with one of ``entries``, split at dots."""
    dotted = [f".{entry}." for entry in entries or ()]
    return lambda name: any(entry in f".{name}." for entry in dotted)
