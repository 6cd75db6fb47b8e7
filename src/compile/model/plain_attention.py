"""Makes a model whose layers write attention out, as matmuls around a softmax, call a function of
transformers' ``AttentionInterface`` instead.

Each module with a softmax of its own is traced alone. In its graph, ``softmax(scale * q k' + mask)
v`` becomes one call, and what only weighed the tokens goes away. Everything else stays as the model
has it. The probe then looks at it as at any other model.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.fx import GraphModule, Node
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from ...errors import UnsupportedModelError

_NUM_TOKENS = 8
_LOWEST = -1e30  # what is below hides a token
_SAME = frozenset({"view", "reshape", "to", "float", "contiguous", "type_as", "type"})
_MATMULS = frozenset({torch.matmul, torch.bmm, operator.matmul})
_ADDS = frozenset({operator.add, operator.iadd, torch.add})
_MULTIPLICATIONS = frozenset({operator.mul, operator.imul, torch.mul})
_DIVISIONS = frozenset({operator.truediv, operator.itruediv, torch.div})

_rewritten: WeakKeyDictionary[nn.Module, dict[nn.Module, Callable[..., Any]]] = WeakKeyDictionary()


@contextmanager
def plain_attention_replaced(module: PreTrainedModel) -> Iterator[None]:
    """In the block, modules that write attention out call the function that the config names.

    Raises:
        UnsupportedModelError: there is no such module, or one computes something else.
    """
    if module not in _rewritten:
        config = module.config
        before = config._attn_implementation_internal
        config._attn_implementation_internal = "eager"
        try:
            _rewritten[module] = {
                part: _forward(_rewrite(part, config, *given))
                for part, given in _softmax_modules(module).items()
            }
        finally:
            config._attn_implementation_internal = before
    forwards = _rewritten[module]
    for part, forward in forwards.items():
        part.forward = forward  # type: ignore[method-assign]
    try:
        yield
    finally:
        for part in forwards:
            vars(part).pop("forward", None)


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
    """The modules that call softmax, and what they are given in a pass of few tokens."""
    softmaxes = _Softmaxes()
    parts = [part for part in module.modules() if not isinstance(part, (nn.Softmax, nn.Dropout))]
    hooks = [part.register_forward_pre_hook(softmaxes.enter, with_kwargs=True) for part in parts]
    hooks += [part.register_forward_hook(softmaxes.leave) for part in parts]
    ids = torch.arange(_NUM_TOKENS, device=module.device).unsqueeze(0)
    try:
        with torch.no_grad(), softmaxes:
            module(input_ids=ids, use_cache=False)
    except Exception as error:
        raise _refusal(module, f"a pass of it fails ({type(error).__name__}: {error})") from error
    finally:
        for hook in hooks:
            hook.remove()
    if not softmaxes.found:
        raise _refusal(module, "it has no softmax")
    return softmaxes.found


def _refusal(module: nn.Module, reason: str) -> UnsupportedModelError:
    return UnsupportedModelError(
        f"{type(module).__name__} does not take its attention function from transformers' "
        f"AttentionInterface, and {reason}"
    )


@dataclass(slots=True)
class _Scores:
    """``scale * query key' + mask``, found in a graph."""

    query: Any
    key: Any
    scale: float
    mask: Node | None


def _rewrite(
    part: nn.Module, config: PreTrainedConfig, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> GraphModule:
    try:
        with torch.no_grad():
            export: Any = torch._dynamo.export(
                part, tracing_mode="symbolic", assume_static_by_default=False
            )
            gm: GraphModule = export(*args, **kwargs)[0]
    except Exception as error:
        reason = str(error).strip().split("\n")[0]
        raise _refusal(part, f"does not trace ({type(error).__name__}: {reason})") from error
    softmaxes = [n for n in gm.graph.nodes if getattr(n.target, "__name__", "") == "softmax"]
    if len(softmaxes) != 1:
        raise _refusal(part, f"has {len(softmaxes)} softmaxes")
    softmax = softmaxes[0]
    dim = softmax.kwargs.get("dim", softmax.args[1] if len(softmax.args) > 1 else None)
    if dim != -1:
        raise _refusal(part, f"has a softmax over dimension {dim}")
    scores = _scores(part, softmax.args[0])
    product = _product(part, softmax)
    with gm.graph.inserting_before(product):
        operands = (scores.query, scores.key, product.args[1], scores.mask)
        call = gm.graph.call_function(_attend(part, config, scores.scale), operands)
    product.replace_all_uses_with(call)
    # The weights are part of what such modules return, for nobody.
    output = next(iter(reversed(gm.graph.nodes)))
    weights = _derived(softmax)
    output.args = torch.fx.map_arg(output.args, lambda n: None if n in weights else n)
    gm.graph.eliminate_dead_code(lambda node: node.op in ("placeholder", "output"))
    gm.recompile()
    return gm


def _forward(gm: GraphModule) -> Callable[..., Any]:
    """As a function: a module that is set on another becomes a part of it."""

    def forward(*args: Any, **kwargs: Any) -> Any:
        return gm(*args, **kwargs)

    return forward


def _attend(part: nn.Module, config: PreTrainedConfig, scale: float) -> Callable[..., Tensor]:
    """Attention by the interface; heads lie before tokens, and a batch before them or not."""

    def attend(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
        operands = [x if x.dim() == 4 else x.unsqueeze(0) for x in (query, key, value)]
        function = ALL_ATTENTION_FUNCTIONS.get_interface(config._attn_implementation, _unknown)
        # Without a mask such code sees all tokens.
        out: Tensor = function(part, *operands, mask, scaling=scale, is_causal=False)[0]
        out = out.transpose(1, 2)
        return out if value.dim() == 4 else out.squeeze(0)

    return attend


def _unknown(*_: Any, **__: Any) -> Any:
    raise AssertionError("the config names an attention function that is not registered")


def _scores(part: nn.Module, node: Any) -> _Scores:
    """Walks up from what a softmax is given to the matmul of queries and keys."""
    scale = 1.0
    mask: Any = None
    while isinstance(node, Node):
        if _name(node) in _SAME:
            node = node.args[0]
        elif node.target in _ADDS and mask is None and _is_mask(node.args[1]):
            node, mask = node.args
        elif node.target in _MULTIPLICATIONS and isinstance(node.args[1], (int, float)):
            node, scale = node.args[0], scale * node.args[1]
        elif node.target in _DIVISIONS and isinstance(node.args[1], (int, float)):
            node, scale = node.args[0], scale / node.args[1]
        elif node.target is torch.max and _is_lowest(node.args[1]):
            node = node.args[0]
        elif node.target in _MATMULS:
            return _Scores(_cast_from(node.args[0]), _untransposed(part, node.args[1]), scale, mask)
        elif node.target is torch.baddbmm and _is_zero(node.args[0]):
            alpha: Any = node.kwargs.get("alpha", 1.0)
            query, key = node.args[1:3]
            scale *= alpha
            return _Scores(_cast_from(query), _untransposed(part, key), scale, mask)
        else:
            break
    raise _refusal(part, f"its scores come from {_name(node)!r}")


def _product(part: nn.Module, softmax: Node) -> Node:
    """The matmul of the weights and the values."""
    found = [
        user
        for node in _derived(softmax)
        for user in node.users
        if user.target in _MATMULS and user.args[0] is node
    ]
    if len(found) != 1:
        raise _refusal(part, f"its weights are multiplied {len(found)} times")
    return found[0]


def _derived(softmax: Node) -> list[Node]:
    """The softmax, and what are its weights in another form."""
    found = [softmax]
    for node in found:
        for user in node.users:
            is_dropout = user.target is F.dropout and not _training(user)
            if user.args[0] is node and (is_dropout or _name(user) in _SAME):
                found.append(user)
    return found


def _training(dropout: Node) -> bool:
    given = (*dropout.args[2:3], dropout.kwargs.get("training"))
    return next((bool(value) for value in given if value is not None), True)


def _name(node: Any) -> str:
    target = getattr(node, "target", node)
    return target if isinstance(target, str) else getattr(target, "__name__", str(target))


def _is_mask(node: Any) -> bool:
    return isinstance(node, Node) and node.op == "placeholder"


def _is_lowest(node: Any) -> bool:
    value: Any = node.args[1] if isinstance(node, Node) and node.target is torch.full else 0.0
    return bool(value <= _LOWEST)


def _is_zero(node: Any) -> bool:
    return isinstance(node, Node) and node.target is torch.zeros


def _cast_from(node: Any) -> Any:
    """Without a cast of the model's dtype to float32, which kernels do themselves."""
    return node.args[0] if _name(node) in ("to", "float") else node


def _untransposed(part: nn.Module, node: Any) -> Any:
    num_dims = node.meta["example_value"].dim() if "example_value" in node.meta else None
    is_last_two = _name(node) == "transpose" and set(node.args[1:]) in (
        {-1, -2},
        {1, 2} if num_dims == 3 else {2, 3},
    )
    if not is_last_two:
        raise _refusal(part, f"its keys come from {_name(node)!r}")
    return _cast_from(node.args[0])
