"""The indexers of a Hugging Face model, which select the positions that attention sees
(DeepSeek-V3.2), are replaced by the project's kernels.

An indexer is a module that passes its keys to ``update_indexer`` of transformers' caches; none is
identified by its model. It is traced alone, with a cache that returns more keys than there are
tokens. Its graph keeps the nodes that compute queries, keys and weights. The rest, which scores the
keys and takes the highest scores (:mod:`.scores`), becomes a call of the thread's
:attr:`.Functions.choose`. The model passes its result to the attention interface as ``indices``.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.fx import GraphModule, Node
from torch.utils._pytree import tree_structure
from transformers import PreTrainedConfig, PreTrainedModel

from ...errors import UnsupportedModelError
from ..fx.nodes import calls_function
from .current_step import IndexCall, Scope, current
from .forward import CACHE_NAMES, cache_parameter
from .layers import describe_layer
from .local_calls import LOCAL
from .scores import IndexScores, Unreadable, find_index_scores, prune, run_few_tokens, trace_part

_NUM_TOKENS = 13  # equal to no other size, so that a trace cannot confuse them
# More than there are tokens, as in decode. With the larger number, no indexer selects all keys.
_FEW_KEYS, _MANY_KEYS = 17, (1 << 24) - 3
_UPDATE = "update_indexer"


@contextmanager
def indexers_replaced(
    module: PreTrainedModel, configs: Sequence[PreTrainedConfig], name_with_masks: str
) -> Iterator[bool]:
    """Within the context, the thread's function selects positions for the model's indexers. Yields
    whether there are any. An indexer takes a part of the mask, so the masks of a model with
    indexers are tensors.

    Args:
        configs: those that name an attention function.
        name_with_masks: an attention function of the thread, for which transformers creates masks.

    Raises:
        UnsupportedModelError: an indexer selects in another way.
    """
    parts = [part for part in module.modules() if _is_indexer(type(part))]
    known = _known.setdefault(module, {})
    if not known.keys() >= set(parts):
        given = _arguments(module, parts, configs, name_with_masks)
        checked: list[Any] = []  # descriptions of indexers
        for part in filter(given.__contains__, parts):
            form = describe_layer(part)
            known[part] = _cut(part, given[part], is_checked=form in checked)
            checked.append(form)
    with Scope() as scope:
        for part in parts:
            if part in known:
                scope.set(part, "forward", _forward(part, known[part]))
        yield bool(parts)


class _Cut(NamedTuple):
    """The remaining graph of an indexer.

    Attributes:
        gm: from the arguments of its ``forward``, by name and without a cache, to the tensors of an
            :class:`IndexCall`, each for one text.
        names: of its parameters, in order.
    """

    gm: GraphModule
    names: tuple[str, ...]
    scale: float
    num_chosen: int


_known: WeakKeyDictionary[nn.Module, dict[nn.Module, _Cut]] = WeakKeyDictionary()


def _is_indexer(kind: type[nn.Module]) -> bool:
    code = getattr(inspect.unwrap(kind.forward), "__code__", None)
    return code is not None and _UPDATE in code.co_names


def _forward(part: nn.Module, cut: _Cut) -> Callable[..., Tensor]:
    gm, names, scale, num_chosen = cut

    def forward(*args: Any, **kwargs: Any) -> Tensor:
        query, key, weights, mask = gm(**_without_cache(names, args, kwargs))
        call = IndexCall(query[0], key[0], weights[0], mask, scale, num_chosen)
        return current.functions.choose(part, call)

    return forward


def _arguments(
    module: PreTrainedModel,
    parts: list[nn.Module],
    configs: Sequence[PreTrainedConfig],
    name_with_masks: str,
) -> dict[nn.Module, dict[str, Any]]:
    """The arguments of the indexers by name, without a cache, in a pass of few tokens with
    one-element masks."""
    found: dict[nn.Module, dict[str, Any]] = {}

    def note(part: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        found[part] = _without_cache(_parameters(part), args, kwargs)

    with Scope() as scope:
        for part in parts:
            scope.hook(part, before=note)
        scope.implementation(configs, name_with_masks)
        scope.set(current, "functions", LOCAL)
        try:
            run_few_tokens(module, _NUM_TOKENS)
        except Unreadable as error:
            raise _refusal(parts[0], error) from error
    return found


@torch._dynamo.allow_in_graph
def _cached_keys(keys: Tensor, num_keys: int) -> Tensor:
    """Placeholder keys of that number; never read."""
    return keys.new_empty(keys.shape[0], num_keys, keys.shape[2])


class _Cache:
    """A cache that contains a text of this many tokens, including those of the pass."""

    def __init__(self, num_keys: int) -> None:
        self._num_keys = num_keys

    def update_indexer(self, keys: Tensor, *_: Any, **__: Any) -> Tensor:
        return _cached_keys(keys, self._num_keys)


def _parameters(part: nn.Module) -> tuple[str, ...]:
    return tuple(inspect.signature(type(part).forward).parameters)[1:]


def _without_cache(
    names: Sequence[str], args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> dict[str, Any]:
    """Arguments of a call by the names ``names``, without the cache."""
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    return {name: value for name, value in given.items() if name not in CACHE_NAMES}


def _cut(part: nn.Module, given: dict[str, Any], *, is_checked: bool) -> _Cut:
    """The remaining graph of an indexer. If ``is_checked``, one of equal description was already
    traced with few keys, too."""
    try:
        gm, update, scores = _traced(part, given, _MANY_KEYS)
        expected = scores._replace(num_chosen=min(scores.num_chosen, _FEW_KEYS))
        of_few = expected if is_checked else _traced(part, given, _FEW_KEYS)[2]
        if scores.num_chosen >= _MANY_KEYS or of_few[3:] != expected[3:]:
            few = f"{of_few.num_chosen} of {_FEW_KEYS} keys"
            raise Unreadable(f"takes {few} and {scores.num_chosen} of {_MANY_KEYS}")
    except Unreadable as error:
        raise _refusal(part, error) from error
    operands = [scores.query, update.args[0], scores.weights, scores.mask]
    gm.graph.output_node().args = (operands,)
    codegen: Any = gm.graph._codegen  # which returns results in the module's own form
    codegen.pytree_info = codegen.pytree_info._replace(out_spec=tree_structure(operands))
    prune(gm)
    return _Cut(gm, _parameters(part), scores.scale, scores.num_chosen)


def _traced(
    part: nn.Module, given: dict[str, Any], num_keys: int
) -> tuple[GraphModule, Node, IndexScores]:
    """The graph of an indexer with that many keys, the node of its keys, and its scores."""
    name = cache_parameter(type(part).forward)
    if name is None:
        raise Unreadable("takes no cache by a known name")
    cache = {name: _Cache(num_keys)}

    def with_cache(**given: Any) -> Any:
        return part.forward(**given, **cache)

    # Nothing is computed, so modes for quantised weights may be off.
    with torch._C.DisableTorchFunction():
        gm = trace_part(with_cache, (), given)
    updates = [node for node in gm.graph.nodes if calls_function(node, _cached_keys)]
    if len(updates) != 1:
        raise Unreadable(f"hands keys to its cache {len(updates)} times")
    return gm, updates[0], find_index_scores(gm, updates[0])


def _refusal(part: nn.Module, reason: Unreadable) -> UnsupportedModelError:
    return UnsupportedModelError(
        f"{type(part).__name__} selects keys for attention in an unsupported way: it {reason}"
    )
