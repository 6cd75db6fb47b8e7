"""Load a checkpoint whose linear layers are to stay quantised.

The module is built without quantisation. Its quantised layers have stand-ins for weights, and the
weights are returned separately, read layer by layer. The whole model is never in float32.
transformers' own quantiser, which replaces layers by other modules, is not used.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from transformers import (
    AutoModelForCausalLM,
    GenerationConfig,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key

from ...errors import InvalidInputError, UnsupportedModelError
from ...kernels.arch import Arch
from ...kernels.matmul.quantized.quantized_weight import QuantizedWeight
from ...kernels.registry import registry
from ..model.linear_weights import check_readers
from ..model.loaded import Shard
from ..weights import is_stand_in, stand_in
from .build_module import read_weights, skeleton_of
from .checkpoint import Checkpoint, CheckpointPart, files_of
from .mtp_names import is_of_mtp
from .quantization_schemes import Scheme, fp8_at_load, scheme_of

_FLOATS = (torch.float32, torch.float16, torch.bfloat16)
_EXPANDED_BY_TRANSFORMERS = ("mxfp4",)  # if its kernels for GPUs are not installed


def quantization_of(config: PreTrainedConfig) -> dict[str, Any] | None:
    """The ``quantization_config`` of a model's config, if it has one."""
    found = getattr(config, "quantization_config", None)
    if found is None:
        return None
    return dict(found) if isinstance(found, dict) else dict(found.to_dict())


def stays_quantised(config: PreTrainedConfig) -> bool:
    """Whether weights stay quantised according to the config, or are refused. False for weights
    that transformers expands when it reads them."""
    method = (quantization_of(config) or {}).get("quant_method")
    return method is not None and method not in _EXPANDED_BY_TRANSFORMERS


def check_quantized(
    name: str,
    config: PreTrainedConfig,
    quantization: str | None,
    dtype: torch.dtype | None,
    device: torch.device,
    shard: Shard,
) -> None:
    """Raise InvalidInputError for settings that quantised layers do not support."""
    own = (quantization_of(config) or {}).get("quant_method")
    if quantization == "fp8" and own not in (None, "fp8"):
        limit = f"the model's weights are quantised already, by {own!r}: leave it out"
        raise InvalidInputError("quantization", quantization, limit)
    if quantization == "fp8" and name.endswith(".gguf"):
        limit = 'a .gguf file is quantised already: "gguf" keeps that'
        raise InvalidInputError("quantization", quantization, limit)
    check_settings(quantization or own, dtype, device, shard)


def check_settings(
    scheme: str | None, dtype: torch.dtype | None, device: torch.device, shard: Shard
) -> None:
    """Raise InvalidInputError for a dtype or ranks that no quantised layers support.

    Args:
        scheme: for the message. dtype: None for the default of the device.
    """
    is_dtype_known = device.type == "cuda" or dtype in (None, torch.float32)
    for field, value, suits, limit in (
        ("dtype", str(dtype), is_dtype_known, "need dtype float32, or auto, on a CPU"),
        ("tensor_parallel_size", shard.num_ranks, shard.num_ranks == 1, "are for one process"),
    ):
        if not suits:
            raise InvalidInputError(field, value, f"weights quantised by {scheme!r} {limit}")


def check_capability(format: str, device: torch.device) -> None:
    """Raise InvalidInputError if weights of the format are not supported."""
    if device.type != "cuda":
        return
    arch = Arch.of(device)
    if registry().find("weights", format, arch) is None:
        known = " or ".join(registry().archs_of("weights", format)) or "none"
        limit = f"weights in {format} are served on GPUs of {known}; this one is {arch.name}"
        raise InvalidInputError("device", str(device), limit)


def described(
    name: str, config: PreTrainedConfig, quantization: str | None, kind: Any = None, **options: Any
) -> tuple[PreTrainedConfig, PreTrainedModel, Scheme | None]:
    """The config without its quantization, its module on the meta device, and the scheme of its
    linear layers: that of the config, or fp8 if ``quantization`` requests it.

    Args:
        kind, options: see :func:`.skeleton_of`.

    Raises:
        UnsupportedModelError: the scheme is unknown.
    """
    plain, found = copy.deepcopy(config), quantization_of(config)
    scheme = None if found is None else scheme_of(name, found)
    if found is not None:
        del plain.quantization_config
    skeleton = skeleton_of(plain, kind, **options)
    if found is None and quantization == "fp8":
        scheme = fp8_at_load(head_of(skeleton))
    return plain, skeleton, scheme


def load_quantized(
    source: str,
    name: str,
    config: PreTrainedConfig,
    dtype: torch.dtype,
    device: torch.device,
) -> tuple[PreTrainedModel, dict[str, QuantizedWeight], str]:
    """The module with stand-ins, the weights by parameter name, and the name of the scheme: that of
    the config, else fp8, quantised here.

    Args:
        dtype: of the module, and of everything that is not quantised.
        device: target of everything. A layer is moved there and then quantised.

    Raises:
        UnsupportedModelError: a scheme, or a quantised tensor, is unknown.
        InvalidInputError: the tensors are not those of the scheme.
    """
    plain, skeleton, scheme = described(name, config, "fp8", AutoModelForCausalLM, dtype=dtype)
    assert scheme is not None  # fp8 has one in any case
    folder = files_of(source, allow_patterns=["*.json", "*.safetensors"])
    module, weights = read_quantized(
        Checkpoint(folder),
        name,
        skeleton,
        scheme,
        device,
        is_made=quantization_of(config) is None,
        config=plain,
        dtype=dtype,
    )
    if (folder / "generation_config.json").is_file():
        module.generation_config = GenerationConfig.from_pretrained(folder)
    return module, weights, scheme.name


def read_quantized(
    checkpoint: Checkpoint,
    name: str,
    skeleton: PreTrainedModel,
    scheme: Scheme,
    device: torch.device,
    *,
    is_made: bool,
    dtype: torch.dtype,
    more: Mapping[str, Tensor] | None = None,
    **options: Any,
) -> tuple[PreTrainedModel, dict[str, QuantizedWeight]]:
    """A module of the class of ``skeleton`` with stand-ins, and the weights by parameter name.

    Args:
        is_made: whether the layers are quantised here.
        more: tensors besides those of the checkpoint.
        options: of the class's ``from_pretrained``.

    Raises: as :func:`load_quantized`.
    """
    linears = linears_of(skeleton)
    if is_made:
        check_readers(skeleton, [n for n in linears if not scheme.is_excluded(n)], is_made=True)
    check_capability(scheme.format, device)
    num_layers: Any = getattr(skeleton.config.get_text_config(), "num_hidden_layers", None)
    if num_layers is not None:  # a layer for drafts may be quantised, and the module has none
        kept = {n: n for n in checkpoint.names if not is_of_mtp(n, num_layers)}
        checkpoint = CheckpointPart(checkpoint, kept)
    names = CheckpointNames(skeleton)
    files = _layers(checkpoint, scheme, linears, name, names, is_made=is_made)
    if not is_made:
        check_readers(skeleton, files, is_made=False)
    state = _plain_tensors(checkpoint, scheme, set(files.values()), name) | dict(more or {})
    shapes = {layer: (linears[layer].out_features, linears[layer].in_features) for layer in files}
    for layer, file in files.items():
        bias = state.get(f"{file}.bias")
        if bias is not None and linears[layer].bias is None and bool(bias.any()):
            raise UnsupportedModelError(f"{name}: {layer} has a bias, which it cannot use")
        state[f"{file}.weight"] = stand_in(shapes[layer], dtype)
    options |= {"state_dict": state, "dtype": dtype}
    module = read_weights(type(skeleton), None, name, **options)
    for layer in files:
        parameter = module.get_submodule(layer).weight
        if not isinstance(parameter, Tensor) or not is_stand_in(parameter):
            raise UnsupportedModelError(f"{name}: transformers changes {layer} as it loads it")
    to_read = [(layer, file, shapes[layer]) for layer, file in files.items()]
    weights = dict(scheme.read_layers(checkpoint, to_read, device))
    _move(module, device)
    if is_made:
        # Parameters that transformers builds from several tensors, or from a part of one.
        quantize = LayerQuantizer(module, device, scheme)
        quantize.replace_all(module)
        weights |= quantize.weights
        if not weights:
            raise UnsupportedModelError(f"{name}: has no linear layer except its head")
    return module, weights


def quantize_module(
    module: PreTrainedModel,
) -> tuple[dict[str, QuantizedWeight], str]:
    """Quantise the linear layers of a module that no other code uses to FP8, one after the other,
    and replace them by stand-ins. Returns the weights by parameter name, and the name of the
    scheme.

    Raises:
        InvalidInputError: the module's GPU does not support it.
    """
    quantize = LayerQuantizer(module, module.device)
    quantize.replace_all(module)
    return quantize.weights, quantize.scheme.name


class LayerQuantizer:
    """Quantises the weights of linear layers that contain them, except the head's.

    Args:
        module: may be on the meta device. scheme: FP8 by default.

    Attributes:
        weights: the quantised ones so far, by parameter name.

    Raises:
        InvalidInputError: the device does not support the format.
    """

    def __init__(
        self, module: PreTrainedModel, device: torch.device, scheme: Scheme | None = None
    ) -> None:
        self.scheme = scheme or fp8_at_load(head_of(module))
        check_capability(self.scheme.format, device)
        self.weights: dict[str, QuantizedWeight] = {}
        layers = (layer for layer in linears_of(module) if not self.scheme.is_excluded(layer))
        self._names = {f"{layer}.weight": layer for layer in layers}

    def __call__(self, name: str, weight: Tensor) -> Tensor:
        """A stand-in for the weight of a layer; other parameters as they are."""
        layer = self._names.get(name)
        if layer is None or is_stand_in(weight):
            return weight
        num_outputs, num_inputs = weight.shape
        shape = num_outputs, num_inputs
        self.weights[name] = self.scheme.read_layer(layer, {"weight": weight}, shape)
        return stand_in(shape, weight.dtype, weight.device)

    def replace_all(self, module: PreTrainedModel) -> None:
        """Quantise the weights of a module, one after the other."""
        for name, layer in self._names.items():
            linear: Any = module.get_submodule(layer)
            linear.weight.data = self(name, linear.weight.data)


def linears_of(module: nn.Module) -> dict[str, nn.Linear]:
    """All linear layers by name."""
    return {n: m for n, m in module.named_modules() if isinstance(m, nn.Linear)}


def head_of(module: PreTrainedModel) -> str:
    """The name of the linear layer that is the LM head; "" if there is none."""
    head = module.get_output_embeddings()
    return next((n for n, m in linears_of(module).items() if m is head), "")


def _move(module: nn.Module, device: torch.device) -> None:
    """As ``module.to(device)``, except for stand-ins."""
    for tensor in [*module.parameters(), *module.buffers()]:
        if is_stand_in(tensor):
            tensor.data = stand_in(tensor.shape, tensor.dtype, device)
        else:
            tensor.data = tensor.data.to(device)


def _layers(
    checkpoint: Checkpoint,
    scheme: Scheme,
    linears: Mapping[str, nn.Linear],
    name: str,
    names: CheckpointNames,
    *,
    is_made: bool,
) -> dict[str, str]:
    """The layers whose weights are read quantised, or quantised when read, by name; with their
    names in the checkpoint."""
    marked = list(scheme.layers(checkpoint.names, names.parameter))
    if not marked:
        raise InvalidInputError("model", name, f"has no {scheme.marker} at all: {scheme.name}")
    found: dict[str, str] = {}
    for file, layer, is_excluded in marked:
        if layer in linears and layer not in found and not is_excluded:
            found[layer] = file
        elif is_made:
            continue
        elif is_excluded:
            limit = f"has {scheme.marker}, and its quantization_config says it is not quantised"
            raise InvalidInputError("model", file, limit)
        else:
            raise UnsupportedModelError(f"{name}: {file} is quantised, but is no linear layer")
    return found


def _plain_tensors(
    checkpoint: Checkpoint, scheme: Scheme, quantized: set[str], name: str
) -> dict[str, Tensor]:
    """The tensors that the module is built from, in addition to its quantised layers' weights.

    Args:
        quantized: names of layers in the checkpoint.
    """
    state: dict[str, Tensor] = {}
    for key in checkpoint.names:
        layer, _, part = key.rpartition(".")
        if layer in quantized and part in scheme.known:
            continue
        tensor = checkpoint.get(key)
        if layer in quantized and part != "bias":
            raise UnsupportedModelError(f"{name}: {key} is not known: {scheme.name}")
        if tensor.is_floating_point() and tensor.dtype not in _FLOATS:
            limit = f"is {tensor.dtype}, and no layer of {scheme.name}"
            raise InvalidInputError("model", key, limit)
        state[key] = tensor
    return state


class CheckpointNames:
    """The parameter of a module that a tensor of its checkpoint becomes, by transformers' own
    table.

    Some checkpoints have other names than the module: they were made before their model was part of
    transformers, or for another class of it. ``from_pretrained`` renames tensors when it loads.

    Args:
        module: may be on the meta device.
    """

    def __init__(self, module: PreTrainedModel) -> None:
        transforms = get_model_conversion_mapping(module)
        self._renamings = [t for t in transforms if isinstance(t, WeightRenaming)]
        self._converters = [t for t in transforms if isinstance(t, WeightConverter)]
        self._by_pattern = {p: c for c in self._converters for p in c.source_patterns}
        self._prefix = module.base_model_prefix
        self._known = module.state_dict()

    def parameter(self, name: str) -> str | None:
        """The parameter that the checkpoint's tensor of this name becomes unchanged. None if the
        tensor is merged with others, split or transposed, or does not belong to the module."""
        found, pattern, _ = self.match(name)
        return found if pattern is None else None

    def match(self, name: str) -> tuple[str | None, str | None, WeightConverter | None]:
        """The parameter that the tensor becomes or is a part of (the first if it becomes several);
        the pattern that its name matches; and its conversion, if there is one. None if it does not
        belong to the module."""
        found, pattern = rename_source_key(
            name, self._renamings, self._converters, self._prefix, self._known
        )
        if found not in self._known and name in self._known:
            found, pattern = rename_source_key(name, [], [], self._prefix, self._known)
        if found not in self._known:
            return None, None, None
        return found, pattern, None if pattern is None else self._by_pattern[pattern]
