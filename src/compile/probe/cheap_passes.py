"""Make the probe's forward passes cheap, by omitting what cannot make tokens depend on others.

- Of layers with equal classes, attributes and shapes of weights, and with equal attention calls,
  one runs: they are the same code at the same sizes.
- A matmul with a weight processes each row separately. A sum of few inputs replaces it, with the
  same shape and the cost of an addition. Its factors come from the weight and are the same in every
  pass.
- The LM head is omitted: passes return its input.

A model that cannot run in this way runs unchanged.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from ...errors import UnsupportedModelError
from ...kernels.attention.attention_spec import AttentionSpec
from ..fx.nodes import GROUPED_MM_NAMES
from ..model.current_step import Scope
from ..model.layers import find_layers, layer_forms
from .probe_pass import ProbePass
from .thresholds import PassCost

# Within a matmul, a multiplication takes 1/32 of the time to write an element.
_MULTIPLICATIONS_PER_ELEMENT = 32
# This many elements of a matrix identify it among others of its shape.
_NUM_KNOWN_BY = 16


@contextmanager
def cheap_passes(probe_pass: ProbePass, specs: Sequence[AttentionSpec]) -> Iterator[PassCost]:
    """Within the context, passes of the model are cheap, if the model supports it."""
    module = probe_pass.loaded.module
    with Scope() as scope:
        scope.enter_context(_skipped(twins(module, specs)))
        scope.set(module.get_output_embeddings(), "forward", lambda x: x)
        scope.enter_context(_CheapMatmuls(module))
        try:
            with probe_pass.stand_in():
                results = probe_pass.results(*probe_pass.base)
            is_cheap = all(bool(x.isfinite().all()) for x in results)
        except UnsupportedModelError:
            is_cheap = False
        if not is_cheap:
            scope.close()
        yield _cost(probe_pass)


def _cost(probe_pass: ProbePass) -> PassCost:
    """Counted in two passes of different lengths, so that the cost of weights alone cancels out."""
    counts, base = [], probe_pass.base
    for repeats in (1, 2):
        with probe_pass.stand_in(), _Counting() as counting:
            probe_pass.results(base[0].repeat(repeats), base[1].repeat(repeats))
        counts.append(counting)
    more = counts[1].elements - counts[0].elements
    return PassCost(counts[0].operations, max(1, more // len(base[0])))


class _Counting(TorchDispatchMode):
    """Counts operations, and the elements that they write."""

    def __init__(self) -> None:
        super().__init__()
        self.operations = 0
        self.elements = 0

    def __torch_dispatch__(
        self, func: Any, _types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        self.operations += 1
        if isinstance(result, Tensor):
            self.elements += result.numel()
            factor = _first_factor(func, args)
            if factor is not None:
                self.elements += result.numel() * factor.shape[-1] // _MULTIPLICATIONS_PER_ELEMENT
        return result


def _first_factor(func: Any, args: tuple[Any, ...]) -> Tensor | None:
    """The first operand of a matmul, or None."""
    name = func.overloadpacket.__name__
    if name in ("mm", "bmm", "matmul", "linear", *GROUPED_MM_NAMES):
        return args[0]  # type: ignore[no-any-return]
    if name in ("addmm", "baddbmm"):
        return args[1]  # type: ignore[no-any-return]
    return None


class _CheapMatmuls(TorchFunctionMode):
    """Replaces each output of a matmul with a weight by a sum of few inputs of its row. The factors
    come from the weight, so that projections of one input differ.

    A weight of the module is identified by its address. Other weights are created in each pass, at
    varying addresses (routers multiply with a float32 copy of theirs). These are identified by
    their values: identified by address, they would have other factors in every pass, and the
    results of the model would seem to depend on the pass.
    """

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        own = (*module.parameters(), *module.buffers())
        self._own = {tensor.untyped_storage().data_ptr() for tensor in own}
        self._factors: dict[tuple[object, int], Tensor] = {}

    def __torch_function__(
        self, func: Any, _types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is F.linear:
            operands = dict(zip(("input", "weight", "bias"), args, strict=False)) | kwargs
            x, weight, bias = operands["input"], operands["weight"], operands.get("bias")
            out = self._mixed(x, weight, weight.shape[0])
            return out if bias is None else out + bias
        if getattr(func, "__name__", "").split(".")[0] in GROUPED_MM_NAMES:
            operands = dict(zip(("input", "weight"), args, strict=False)) | kwargs
            weight = operands["weight"]
            return self._mixed(operands["input"], weight, weight.shape[-1])
        return func(*args, **kwargs)

    def _mixed(self, x: Tensor, weight: Tensor, num_outputs: int) -> Tensor:
        num_inputs = x.shape[-1]
        key = self._identity(weight), num_outputs
        if key not in self._factors:
            frequency = 1.0 + 0.37 * len(self._factors)
            factors = torch.cos(frequency * torch.arange(num_outputs, device=x.device)) * 1.4
            self._factors[key] = factors.to(x.dtype)
        if num_outputs < num_inputs:
            num_terms = -(-num_inputs // num_outputs)
            padded = F.pad(x, (0, num_terms * num_outputs - num_inputs))
            x = padded.unflatten(-1, (num_terms, num_outputs)).sum(-2) * num_terms**-0.5
        elif num_outputs > num_inputs:
            x = x[..., torch.arange(num_outputs, device=x.device) % num_inputs]
        return x * self._factors[key]

    def _identity(self, weight: Tensor) -> object:
        if weight.untyped_storage().data_ptr() in self._own:
            return weight.data_ptr()
        # A few elements, each of another row and column. As text, in which NaN equals NaN.
        matrix = weight if weight.dim() == 2 else weight[0]
        few = matrix.diagonal()[:_NUM_KNOWN_BY].tolist()
        return f"{tuple(weight.shape)} {few}"


def twins(module: nn.Module, specs: Sequence[AttentionSpec]) -> dict[nn.Module, nn.Module]:
    """Each layer that equals an earlier one, and the first one that it equals."""
    found = find_layers(module, len(specs))
    firsts: list[tuple[Any, nn.Module]] = []
    later: dict[nn.Module, nn.Module] = {}
    if found is None:
        return later
    for layer, form in zip(found.layers, layer_forms(found, specs), strict=True):
        first = next((other for known, other in firsts if known == form), None)
        if first is None:
            firsts.append((form, layer))
        else:
            later[layer] = first
    return later


@contextmanager
def _skipped(firsts: Mapping[nn.Module, nn.Module]) -> Iterator[None]:
    """Within the context, layers with a twin return their input, in the form of the twin's
    output."""
    returned: dict[nn.Module, Any] = {}

    def remember(layer: nn.Module, _inputs: Any, output: Any) -> None:
        returned[layer] = output

    def skip(first: nn.Module) -> Callable[..., Any]:
        def forward(*args: Any, **kwargs: Any) -> Any:
            hidden = args[0] if args else kwargs["hidden_states"]
            output = returned[first]
            return hidden if isinstance(output, Tensor) else (hidden, *output[1:])

        return forward

    with Scope() as scope:
        for first in dict.fromkeys(firsts.values()):
            scope.hook(first, after=remember)
        for layer, first in firsts.items():
            scope.set(layer, "forward", skip(first))
        yield
