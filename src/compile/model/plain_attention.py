"""Makes a model whose layers write attention out, as matmuls around a softmax, call a function of
transformers' ``AttentionInterface`` instead.

Each module with a softmax of its own is traced alone. In its graph, ``softmax(scale * q k' + mask)
v`` becomes one call, and what only weighed the tokens goes away. A bias on the scores besides the
mask (ALiBi) is handed on to that call. Everything else stays as the model has it. The probe then
looks at it as at any other model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.fx import GraphModule, Node
from torch.overrides import TorchFunctionMode
from transformers import AttentionMaskInterface, PreTrainedConfig, PreTrainedModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from .plain_scores import Scores, find_product, find_scores, refusal, weights_from

_NUM_TOKENS = 8


@dataclass(frozen=True, slots=True)
class _Rewritten:
    """What stands for the ``forward`` of a model's modules.

    Attributes:
        has_bool_masks: the model makes masks of its own of those of transformers, which must be
            tensors then.
    """

    forwards: dict[nn.Module, Callable[..., Any]]
    has_bool_masks: bool


_rewritten: WeakKeyDictionary[nn.Module, _Rewritten] = WeakKeyDictionary()


@contextmanager
def plain_attention_replaced(
    module: PreTrainedModel, name: str, takers: Sequence[PreTrainedConfig]
) -> Iterator[None]:
    """In the block, modules that write attention out call the function that the config names, which
    is ``name``. ``takers`` are the configs of those parts that call it anyhow.

    Raises:
        UnsupportedModelError: such a module computes something else.
    """
    if module not in _rewritten:
        config = module.config
        before = [(c, c._attn_implementation_internal) for c in [*takers, config]]
        # These are to call no function that takes notes, and no softmax.
        for taker in takers:
            taker._attn_implementation_internal = "sdpa"
        config._attn_implementation_internal = "eager"
        try:
            forwards, has_bool_masks = {}, False
            for part, given in _softmax_modules(module).items():
                gm, mask = _rewrite(part, config, *given)
                forwards[part] = _forward(gm)
                has_bool_masks |= (
                    mask is not None and mask.meta["example_value"].dtype == torch.bool
                )
            _rewritten[module] = _Rewritten(forwards, has_bool_masks)
        finally:
            for changed, implementation in before:
                changed._attn_implementation_internal = implementation
    rewritten = _rewritten[module]
    for part, forward in rewritten.forwards.items():
        part.forward = forward  # type: ignore[method-assign]
    try:
        with masks_are_tensors(name) if rewritten.has_bool_masks else nullcontext():
            yield
    finally:
        for part in rewritten.forwards:
            vars(part).pop("forward", None)


@contextmanager
def masks_are_tensors(name: str) -> Iterator[None]:
    """In the block, the masks for the attention function ``name`` are tensors: where there would be
    none, of one element."""
    before: Any = AttentionMaskInterface._global_mapping.get(name)

    def mask(*args: Any, **kwargs: Any) -> Tensor:
        made = None if before is None else before(*args, **kwargs)
        return torch.zeros(1, 1, 1, 1, device=kwargs.get("device")) if made is None else made

    AttentionMaskInterface.register(name, mask)
    try:
        yield
    finally:
        if before is None:
            del AttentionMaskInterface._global_mapping[name]
        else:
            AttentionMaskInterface.register(name, before)


class _Softmaxes(TorchFunctionMode):
    """Notes the innermost call that each softmax is in."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[nn.Module, tuple[Any, ...], dict[str, Any]]] = []
        self.found: dict[nn.Module, tuple[tuple[Any, ...], dict[str, Any]]] = {}

    def __torch_function__(
        self, func: Any, _types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if getattr(func, "__name__", "") == "softmax" and self.calls:
            part, given_args, given_kwargs = self.calls[-1]
            self.found[part] = given_args, given_kwargs
        return func(*args, **(kwargs or {}))

    def enter(self, part: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.calls.append((part, args, kwargs))

    def leave(self, *_: Any) -> None:
        self.calls.pop()


def _softmax_modules(
    module: PreTrainedModel,
) -> dict[nn.Module, tuple[tuple[Any, ...], dict[str, Any]]]:
    """The modules that call softmax, and what they are given in a pass of few tokens: none if those
    whose config does not take the function have no part in it (a vision tower)."""
    softmaxes = _Softmaxes()
    parts = [part for part in module.modules() if not isinstance(part, (nn.Softmax, nn.Dropout))]
    hooks = [part.register_forward_pre_hook(softmaxes.enter, with_kwargs=True) for part in parts]
    hooks += [part.register_forward_hook(softmaxes.leave) for part in parts]
    ids = torch.arange(_NUM_TOKENS, device=module.device).unsqueeze(0)
    try:
        with torch.no_grad(), softmaxes:
            module(input_ids=ids, use_cache=False)
    except Exception as error:
        raise refusal(module, f"a pass of it fails ({type(error).__name__}: {error})") from error
    finally:
        for hook in hooks:
            hook.remove()
    return softmaxes.found


def _rewrite(
    part: nn.Module, config: PreTrainedConfig, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[GraphModule, Node | None]:
    """The module as a graph that calls an attention function, and the mask that it hands on."""
    try:
        with torch.no_grad():
            export: Any = torch._dynamo.export(
                part, tracing_mode="symbolic", assume_static_by_default=False
            )
            gm: GraphModule = export(*args, **kwargs)[0]
    except Exception as error:
        reason = str(error).strip().split("\n")[0]
        raise refusal(part, f"does not trace ({type(error).__name__}: {reason})") from error
    softmaxes = [n for n in gm.graph.nodes if getattr(n.target, "__name__", "") == "softmax"]
    if len(softmaxes) != 1:
        raise refusal(part, f"has {len(softmaxes)} softmaxes")
    softmax = softmaxes[0]
    dim = softmax.kwargs.get("dim", softmax.args[1] if len(softmax.args) > 1 else None)
    if dim != -1:
        raise refusal(part, f"has a softmax over dimension {dim}")
    scores = find_scores(part, softmax.args[0])
    product = find_product(part, softmax)
    with gm.graph.inserting_before(product):
        operands = (scores.query, scores.key, product.args[1], scores.mask, scores.bias)
        call = gm.graph.call_function(_attend(part, config, scores), operands)
    product.replace_all_uses_with(call)
    # The weights are part of what such modules return, for nobody.
    output = next(iter(reversed(gm.graph.nodes)))
    weights = weights_from(softmax)
    output.args = torch.fx.map_arg(output.args, lambda n: None if n in weights else n)
    gm.graph.eliminate_dead_code(lambda node: node.op in ("placeholder", "output"))
    gm.recompile()
    return gm, scores.mask


def _forward(gm: GraphModule) -> Callable[..., Any]:
    """As a function: a module that is set on another becomes a part of it."""

    def forward(*args: Any, **kwargs: Any) -> Any:
        return gm(*args, **kwargs)

    return forward


def _attend(part: nn.Module, config: PreTrainedConfig, scores: Scores) -> Callable[..., Tensor]:
    """Attention by the interface; heads lie before tokens, and a batch before them or not."""
    scale, bias_scale, own_window = scores.scale, scores.bias_scale, scores.own_window

    def attend(
        query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, bias: Tensor | None
    ) -> Tensor:
        operands = [x if x.dim() == 4 else x.unsqueeze(0) for x in (query, key, value)]
        function = ALL_ATTENTION_FUNCTIONS.get_interface(config._attn_implementation, _unknown)
        # Without any mask such code sees all tokens.
        options: dict[str, Any] = {"scaling": scale, "is_causal": own_window is not None}
        if own_window is not None:
            options["own_window"] = own_window
        if bias is not None:
            alibi = bias if bias.dim() == 4 else bias.unsqueeze(0)
            options["alibi"] = alibi if bias_scale == 1.0 else alibi * bias_scale
        out: Tensor = function(part, *operands, mask, **options)[0]
        out = out.transpose(1, 2)
        return out if value.dim() == 4 else out.squeeze(0)

    return attend


def _unknown(*_: Any, **__: Any) -> Any:
    raise AssertionError("the config names an attention function that is not registered")
