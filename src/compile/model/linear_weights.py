"""Run a module whose linear layers are quantised, and find layers whose weight is read by more than
``F.linear``. Such a weight cannot stay quantised.

A transpose may be read: ``x @ weight.T`` becomes ``linear`` in the graph
(:mod:`..passes.write_as_linear`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves
from transformers import PreTrainedModel

from ...errors import InvalidInputError, PagespecError, UnsupportedModelError
from ...kernels.matmul.quantized.quantized_weight import QuantizedWeight
from ..weights import is_stand_in
from .attention import attention_implementation
from .forward import PackedForward
from .loaded import LoadedModel
from .local_calls import LOCAL

_TRANSPOSES = (
    Tensor.T.__get__,  # type: ignore[attr-defined]
    Tensor.mT.__get__,  # type: ignore[attr-defined]
    Tensor.t,
    torch.t,
    Tensor.transpose,
    torch.transpose,
    Tensor.permute,
    torch.permute,
)
_NUM_TOKENS = 4


class _WatchedWeights(TorchFunctionMode):
    """Checks that only ``F.linear`` or a transpose reads the weights, which are given by name per
    ``id`` of their parameters.

    Args:
        held: by the same ids, weights to multiply with, each expanded for the call.
        refuse: creates the error that is raised for another reader, from the parameter's name.
    """

    def __init__(
        self,
        names: Mapping[int, str],
        held: Mapping[int, QuantizedWeight],
        refuse: Callable[[str], Exception],
    ) -> None:
        super().__init__()
        self._names = names
        self._held = held
        self._refuse = refuse

    def __torch_function__(
        self, func: Any, _types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is F.linear:
            operands = dict(zip(("input", "weight", "bias"), args, strict=False)) | kwargs
            held = self._held.get(id(operands["weight"]))
            if held is None:
                return func(*args, **kwargs)
            matrix = held.expanded().to(operands["input"].dtype)
            return func(operands["input"], matrix, operands.get("bias"))
        read = [leaf for leaf in tree_leaves((args, kwargs)) if id(leaf) in self._names]
        if not read:
            return func(*args, **kwargs)
        if func in _TRANSPOSES and read[0] is args[0]:
            held = self._held.get(id(read[0]))
            matrix = read[0] if held is None else held.expanded().to(read[0].dtype)
            return func(matrix, *args[1:], **kwargs)
        result = func(*args, **kwargs)
        if any(isinstance(leaf, Tensor) for leaf in tree_leaves(result)):
            raise self._refuse(self._names[id(read[0])])
        return result  # a size or a dtype


def _refusal(architecture: str, parameter: str, is_made: bool) -> PagespecError:
    layer = parameter.removesuffix(".weight")
    reason = f"{architecture} reads the weight of {layer} by more than its linear layer"
    if is_made:
        return InvalidInputError("quantization", "fp8", f"{reason}, so it cannot be quantised")
    return UnsupportedModelError(f"{reason}, and it is quantised")


@contextmanager
def expanded_linears(loaded: LoadedModel) -> Iterator[None]:
    """Within the context, the module computes with its quantised weights, with one layer expanded
    at a time.

    Raises:
        InvalidInputError, UnsupportedModelError: the module reads a weight in another way.
    """
    held, names = {}, {}
    for name, parameter in loaded.module.named_parameters():
        weight = loaded.quantized.get(name)
        if is_stand_in(parameter) and weight is not None:
            held[id(parameter)], names[id(parameter)] = weight, name
    if not held:
        yield
        return
    is_made = loaded.is_quantized_at_load
    with _WatchedWeights(names, held, lambda name: _refusal(loaded.architecture, name, is_made)):
        yield


def check_readers(skeleton: PreTrainedModel, layers: Iterable[str], *, is_made: bool) -> None:
    """Refuse a module that reads the weights of these layers outside their linear layers, before
    any weight is read from a file.

    Args:
        skeleton: on the meta device. If its control flow depends on values, nothing may be found;
            :func:`expanded_linears` then finds it.
        is_made: whether the loader is to quantise the layers. Otherwise the checkpoint has them
            quantised.

    Raises:
        InvalidInputError, UnsupportedModelError: the module does.
    """
    wanted = {f"{layer}.weight" for layer in layers}
    names = {id(p): name for name, p in skeleton.named_parameters() if name in wanted}
    architecture = type(skeleton).__name__
    mode = _WatchedWeights(names, {}, lambda name: _refusal(architecture, name, is_made))
    ids = torch.zeros(1, _NUM_TOKENS, dtype=torch.int64, device="meta")
    found: PagespecError | None = None
    with suppress(Exception), attention_implementation(skeleton, LOCAL):
        try:
            with torch.inference_mode(), mode:
                PackedForward(skeleton)(ids, ids, ids[0])
        except PagespecError as error:
            found = error
    if found is not None:
        raise found
