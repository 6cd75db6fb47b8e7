"""Make a model whose layers compute attention explicitly, as matmuls around a softmax, call a
function of transformers' ``AttentionInterface`` instead.

Each module with its own softmax is traced alone. In its graph, ``softmax(scale * q k' + mask) v``
becomes one call, and the nodes that only computed the weights are erased. A bias on the scores
besides the mask (ALiBi) becomes an argument of that call. Everything else stays. The probe then
treats the model as any other.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.fx import GraphModule, Node
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedConfig, PreTrainedModel

from ...errors import UnsupportedModelError
from ..fx.nodes import calls
from .current_step import RunningCall, Scope, current
from .scores import (
    Scores,
    Unreadable,
    find_product,
    find_scores,
    own_forward,
    prune,
    run_few_tokens,
    trace_part,
    weights_from,
)

_NUM_TOKENS = 8


class _Rewritten(NamedTuple):
    """Replacements for the ``forward`` of a model's modules.

    Attributes:
        has_bool_masks: whether the model derives its own masks from those of transformers, which
            must be tensors then.
    """

    forwards: dict[nn.Module, Callable[..., Any]]
    has_bool_masks: bool


_rewritten: WeakKeyDictionary[nn.Module, _Rewritten] = WeakKeyDictionary()


@contextmanager
def plain_attention_replaced(
    module: PreTrainedModel, takers: Sequence[PreTrainedConfig]
) -> Iterator[bool]:
    """Within the context, modules with explicit attention call the thread's function. Yields
    whether the model needs masks that are tensors. ``takers`` are the configs of the parts that
    call the function anyway.

    Raises:
        UnsupportedModelError: such a module computes something else.
    """
    if module not in _rewritten:
        _rewritten[module] = _rewrite(module, takers)
    forwards, has_bool_masks = _rewritten[module]
    with Scope() as scope:
        for part, forward in forwards.items():
            scope.set(part, "forward", forward)
        yield has_bool_masks


def _rewrite(module: PreTrainedModel, takers: Sequence[PreTrainedConfig]) -> _Rewritten:
    part: nn.Module = module
    forwards, masks = {}, []
    with Scope() as scope:
        # These parts must call neither the thread's function nor a softmax.
        scope.implementation(takers, "sdpa")
        scope.implementation([module.config], "eager")
        try:
            for call in _softmax_calls(module):
                part = call.part
                gm, mask = _rewrite_part(*call)
                forwards[part] = own_forward(gm)
                masks.append(mask)
        except Unreadable as error:
            raise UnsupportedModelError(
                f"{type(part).__name__} does not take its attention function from transformers' "
                f"AttentionInterface, and {error}"
            ) from error
    dtypes = [mask.meta["example_value"].dtype for mask in masks if mask is not None]
    return _Rewritten(forwards, torch.bool in dtypes)


class _Softmaxes(TorchFunctionMode):
    """Records the innermost call that contains each softmax, by its module."""

    def __init__(self, running: list[RunningCall]) -> None:
        super().__init__()
        self._running = running
        self.found: dict[nn.Module, RunningCall] = {}

    def __torch_function__(
        self, func: Any, _types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if getattr(func, "__name__", "") == "softmax" and self._running:
            self.found[self._running[-1].part] = self._running[-1]
        return func(*args, **(kwargs or {}))


def _softmax_calls(module: PreTrainedModel) -> list[RunningCall]:
    """The calls that call softmax in a pass of few tokens. Empty if the parts whose config does not
    take the function are not used in it (a vision tower)."""
    parts = [part for part in module.modules() if not isinstance(part, (nn.Softmax, nn.Dropout))]
    with Scope() as scope, _Softmaxes(scope.running(parts)) as softmaxes:
        run_few_tokens(module, _NUM_TOKENS)
    return [*softmaxes.found.values()]


def _rewrite_part(
    part: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[GraphModule, Node | None]:
    """The module as a graph that calls an attention function, and the mask that it passes."""
    gm = trace_part(part, args, kwargs)
    softmaxes = [node for node in gm.graph.nodes if calls(node, "softmax")]
    if len(softmaxes) != 1:
        raise Unreadable(f"has {len(softmaxes)} softmaxes")
    softmax = softmaxes[0]
    dim = softmax.kwargs.get("dim", softmax.args[1] if len(softmax.args) > 1 else None)
    if dim != -1:
        raise Unreadable(f"has a softmax over dimension {dim}")
    scores, product = find_scores(softmax), find_product(softmax)
    with gm.graph.inserting_before(product):
        operands = (scores.query, scores.key, product.args[1], scores.mask, scores.bias)
        product.replace_all_uses_with(gm.graph.call_function(_attend(part, scores), operands))
    # Such modules also return the weights, but no caller reads them.
    weights = weights_from(softmax)
    output = gm.graph.output_node()
    output.args = torch.fx.map_arg(output.args, lambda n: None if n in weights else n)
    prune(gm)
    return gm, scores.mask


def _attend(part: nn.Module, scores: Scores) -> Callable[..., Tensor]:
    """Attention by the thread's function. The heads dimension comes before the tokens dimension,
    with or without a batch dimension before it."""
    # Without any mask such code sees all tokens.
    fixed: dict[str, Any] = {"scaling": scores.scale, "is_causal": scores.own_window is not None}
    if scores.own_window is not None:
        fixed["own_window"] = scores.own_window
    bias_scale = scores.bias_scale

    def attend(
        query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, bias: Tensor | None
    ) -> Tensor:
        operands = [x if x.dim() == 4 else x.unsqueeze(0) for x in (query, key, value)]
        options = dict(fixed)
        if bias is not None:
            alibi = bias if bias.dim() == 4 else bias.unsqueeze(0)
            options["alibi"] = alibi if bias_scale == 1.0 else alibi * bias_scale
        out: Tensor = current.functions.attention(part, *operands, mask, **options)[0]
        out = out.transpose(1, 2)
        return out if value.dim() == 4 else out.squeeze(0)

    return attend
