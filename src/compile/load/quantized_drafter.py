"""Quantise the model of a drafter to FP8 at load, with its LM head.

The head of a target stays in its dtype, since its logits are the answer. Logits of a drafter only
propose tokens, and its head is most of what it reads per draft token. So the drafter has an FP8
head of its own, also where it shares the target's head or the head's weight is an embedding's.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedModel

from ...errors import InvalidInputError
from ...kernels.matmul.quantized.quantized_weight import BLOCK, QuantizedWeight, merged
from ..model.loaded import WHOLE, LoadedDrafter, LoadedModel
from ..weights import is_stand_in, stand_in
from .quantization_schemes import fp8_at_load
from .quantized_load import check_capability, check_settings, head_of, quantize_module

QUANTIZATION_KEY = "speculative_config.quantization"
_ROWS_AT_ONCE = 64 * BLOCK  # quantising takes several copies in float32


@contextmanager
def named_as_drafters(is_own: bool) -> Iterator[None]:
    """Refusals of ``quantization`` in the context name :data:`QUANTIZATION_KEY`.

    Args:
        is_own: whether the drafter has a quantization of its own. If not, nothing is renamed.
    """
    try:
        yield
    except InvalidInputError as error:
        if not is_own or error.field != "quantization":
            raise
        raise error.renamed(QUANTIZATION_KEY) from error


def check_target(target: LoadedModel) -> None:
    """Refuse a target whose drafter has its dtype and device, and cannot be quantised there.

    Raises:
        InvalidInputError: names ``dtype`` or ``device``, as for a target with ``quantization``.
    """
    check_settings("fp8", target.dtype, target.device, WHOLE)
    check_capability("fp8", target.device)


def quantize_drafter(drafter: LoadedDrafter) -> LoadedDrafter:
    """The drafter with linear layers and head in FP8, in place. Layers that are in FP8 already stay
    as they are, and so do all others of a checkpoint in FP8, except the head.

    Raises:
        InvalidInputError: names ``quantization``: its layers are in another format, or its head is
            no linear layer or already quantised. Or the device does not support FP8.
    """
    loaded = drafter.loaded
    module, weights = loaded.module, loaded.quantized.copy()
    check_capability("fp8", loaded.device)
    formats = {"float16" if weight is None else weight.format for weight in weights.values()}
    if formats - {"fp8"}:
        limit = f"the drafter's weights are quantised already, by {loaded.quantization!r}"
        raise InvalidInputError("quantization", "fp8", f"{limit}: leave it out")
    layer = head_of(module)
    if not layer:
        limit = f"the head of {type(module).__name__} is no linear layer"
        raise InvalidInputError("quantization", "fp8", limit)
    if f"{layer}.weight" in weights:
        return drafter
    head = _own_head(module, layer)
    options: dict[str, Any] = {}
    if not weights:
        made, scheme = quantize_module(module)
        weights.update(made)
        options = {"quantization": scheme, "is_quantized_at_load": True}
    weight = head.weight.detach()
    weights[f"{layer}.weight"] = _quantized(layer, weight)
    values = stand_in(weight.shape, weight.dtype, weight.device)
    head.weight = nn.Parameter(values, requires_grad=False)
    return replace(drafter, loaded=replace(loaded, quantized=weights, **options))


def _own_head(module: PreTrainedModel, layer: str) -> nn.Linear:
    """Insert a copy of the head of this name, which no other module has. Parameters are not
    copied."""
    shared = module.get_submodule(layer)
    assert isinstance(shared, nn.Linear)  # head_of looks for such layers
    if is_stand_in(shared.weight):
        limit = "the target's head, which the drafter shares, is quantised already: leave it out"
        raise InvalidInputError("quantization", "fp8", limit)
    head = copy.copy(shared)
    head._parameters = dict(shared._parameters)
    parent, _, last = layer.rpartition(".")
    setattr(module.get_submodule(parent), last, head)
    return head


def _quantized(layer: str, weight: Tensor) -> QuantizedWeight:
    """The FP8 weight of a layer. Raises InvalidInputError for NaN or infinity."""
    scheme = fp8_at_load("")
    parts: list[QuantizedWeight | None] = [
        scheme.read_layer(layer, {"weight": rows}, (len(rows), weight.shape[1]))
        for rows in weight.split(_ROWS_AT_ONCE)
    ]
    whole = merged(parts)
    assert whole is not None  # all parts have one form
    return whole
