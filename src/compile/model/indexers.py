"""The indexers of a Hugging Face model, which choose the positions that attention sees
(DeepSeek-V3.2), replaced by ours.

An indexer is a module that hands its keys to ``update_indexer`` of transformers' caches; none is
known by its model. It is traced alone, with a cache that returns more keys than there are tokens.
Of its graph stays what makes queries, keys and weights; what scores the keys and takes the highest
scores (:mod:`.index_scores`) becomes an :data:`IndexFunction`: one that keeps the keys in the
caches of the step's requests, or a stand-in of the probe. What it returns, the model hands to the
attention interface as ``indices``.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.fx import GraphModule, Node
from torch.utils._pytree import tree_structure
from transformers import AttentionInterface, PreTrainedConfig, PreTrainedModel

from ...errors import UnsupportedModelError
from ...kernels import ops
from ..fx.nodes import calls_function
from .current_step import current
from .forward import CACHE_NAMES, cache_parameter
from .index_scores import IndexScores, NoIndexer, find_index_scores
from .plain_attention import masks_are_tensors

_NUM_TOKENS = 13  # which is no other size, or a trace would take one for the other
# More than there are tokens, as in a decode; of the many, no indexer takes all.
_FEW_KEYS, _MANY_KEYS = 17, (1 << 24) - 3
_UPDATE = "update_indexer"
_NAME = "pagespec_indexers"


class IndexCall(NamedTuple):
    """One call of an indexer.

    Attributes:
        query: ``[T, H, D]``. key: ``[T, D]``. weights: ``[T, H]``.
        mask: what the model adds to scores.
        scale: factor on the products. num_chosen: positions to choose.
    """

    query: Tensor
    key: Tensor
    weights: Tensor
    mask: Any
    scale: float
    num_chosen: int


IndexFunction = Callable[[nn.Module, IndexCall], Tensor]
"""The positions chosen for each token, int32 ``[1, T, num_chosen]``."""


def choose_on_caches(module: nn.Module, call: IndexCall) -> Tensor:
    """The choice among the positions of the step's requests."""
    step = current.step
    assert step is not None
    number: int = module.pagespec_index_call  # type: ignore[assignment]
    inputs = step.inputs
    chosen = ops.index_topk(
        call.query,
        call.key,
        call.weights,
        step.kv_caches[number][-1],
        inputs.slot_mapping,
        inputs.query_starts,
        inputs.context_lens,
        inputs.block_tables,
        inputs.table_rows,
        call.scale,
        call.num_chosen,
    )
    return chosen.unsqueeze(0)


@contextmanager
def indexers_replaced(
    module: PreTrainedModel,
    name: str,
    configs: Sequence[PreTrainedConfig],
    function: IndexFunction,
) -> Iterator[None]:
    """In the block, what the model's indexers choose is the function's; the masks that it makes for
    the attention function ``name`` are tensors, of which an indexer takes a part.

    Args:
        configs: those that name an attention function.

    Raises:
        UnsupportedModelError: an indexer chooses in another way.
    """
    parts = [part for part in module.modules() if _is_indexer(type(part))]
    if not parts:
        yield
        return
    known = _known.setdefault(module, {})
    if not known.keys() >= set(parts):
        given = _arguments(module, parts, configs)
        known.update({part: _cut(part, *given[part]) for part in parts if part in given})
    cuts = {part: known[part] for part in parts if part in known}
    for part, cut in cuts.items():
        part.forward = _forward(part, cut, function)  # type: ignore[method-assign]
    try:
        with masks_are_tensors(name):
            yield
    finally:
        for part in cuts:
            vars(part).pop("forward", None)


class _Cut(NamedTuple):
    """What is left of an indexer.

    Attributes:
        gm: from what its ``forward`` is given, by name and without a cache, to the tensors of an
            :class:`IndexCall`, each of one text.
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


def _forward(part: nn.Module, cut: _Cut, function: IndexFunction) -> Callable[..., Tensor]:
    gm, names, scale, num_chosen = cut

    def forward(*args: Any, **kwargs: Any) -> Tensor:
        query, key, weights, mask = gm(**_without_cache(names, args, kwargs))
        call = IndexCall(query[0], key[0], weights[0], mask, scale, num_chosen)
        return function(part, call)

    return forward


_Arguments = tuple[tuple[Any, ...], dict[str, Any]]


def _arguments(
    module: PreTrainedModel, parts: list[nn.Module], configs: Sequence[PreTrainedConfig]
) -> dict[nn.Module, _Arguments]:
    """What the indexers are given in a pass of few tokens, with masks of one element."""
    found: dict[nn.Module, _Arguments] = {}

    def note(part: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        found[part] = args, kwargs

    def values(
        _part: nn.Module, query: Tensor, _key: Tensor, value: Tensor, *_: Any, **__: Any
    ) -> Any:
        out = value.repeat_interleave(query.shape[1] // value.shape[1], 1)
        return out.transpose(1, 2), None

    hooks = [part.register_forward_pre_hook(note, with_kwargs=True) for part in parts]
    before = [(config, config._attn_implementation_internal) for config in configs]
    AttentionInterface.register(_NAME, values)
    ids = torch.arange(_NUM_TOKENS, device=module.device).unsqueeze(0)
    try:
        for config in configs:
            config._attn_implementation_internal = _NAME
        with torch.no_grad(), masks_are_tensors(_NAME):
            module(input_ids=ids, use_cache=False)
    except Exception as error:
        reason = f"a pass of it fails ({type(error).__name__}: {error})"
        raise _refusal(parts[0], reason) from error
    finally:
        AttentionInterface._global_mapping.pop(_NAME, None)
        for config, implementation in before:
            config._attn_implementation_internal = implementation
        for hook in hooks:
            hook.remove()
    return found


@torch._dynamo.allow_in_graph
def _cached_keys(keys: Tensor, num_keys: int) -> Tensor:
    """As many; nobody looks at them."""
    return keys.new_empty(keys.shape[0], num_keys, keys.shape[2])


class _Cache:
    """A cache that holds a text of so many tokens, those of the pass included."""

    def __init__(self, num_keys: int) -> None:
        self._num_keys = num_keys

    def update_indexer(self, keys: Tensor, *_: Any, **__: Any) -> Tensor:
        return _cached_keys(keys, self._num_keys)


def _without_cache(
    names: Sequence[str], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> dict[str, Any]:
    """What a call of parameters ``names`` is given, by name."""
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    return {name: value for name, value in given.items() if name not in CACHE_NAMES}


def _cut(part: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Cut:
    names = tuple(inspect.signature(type(part).forward).parameters)[1:]
    given = _without_cache(names, args, kwargs)
    gm, update, scores = _traced(part, given, _MANY_KEYS)
    of_few = _traced(part, given, _FEW_KEYS)[2]
    expected = scores._replace(num_chosen=min(scores.num_chosen, _FEW_KEYS))
    if scores.num_chosen >= _MANY_KEYS or of_few[3:] != expected[3:]:
        numbers = f"{of_few.num_chosen} of {_FEW_KEYS} keys and {scores.num_chosen} of {_MANY_KEYS}"
        raise _refusal(part, f"takes {numbers}")
    output = next(iter(reversed(gm.graph.nodes)))
    operands = [scores.query, update.args[0], scores.weights, scores.mask]
    output.args = (operands,)
    codegen: Any = gm.graph._codegen  # which puts results into the form of the module's own
    codegen.pytree_info = codegen.pytree_info._replace(out_spec=tree_structure(operands))
    gm.graph.eliminate_dead_code(lambda node: node.op in ("placeholder", "output"))
    gm.recompile()
    return _Cut(gm, names, scores.scale, scores.num_chosen)


def _traced(
    part: nn.Module, given: dict[str, Any], num_keys: int
) -> tuple[GraphModule, Node, IndexScores]:
    """The graph of an indexer with so many keys, where these come into it, and what it computes."""
    name = cache_parameter(type(part).forward)
    if name is None:
        raise _refusal(part, "takes no cache by a known name")
    cache = {name: _Cache(num_keys)}

    def with_cache(**given: Any) -> Any:
        return part.forward(**given, **cache)

    try:
        # Nothing is computed: what modes do with quantised weights is of no matter.
        with torch.no_grad(), torch._C.DisableTorchFunction():
            export: Any = torch._dynamo.export(
                with_cache, tracing_mode="symbolic", assume_static_by_default=False
            )
            gm: GraphModule = export(**given)[0]
    except Exception as error:
        reason = str(error).strip().split("\n")[0]
        raise _refusal(part, f"does not trace ({type(error).__name__}: {reason})") from error
    updates = [node for node in gm.graph.nodes if calls_function(node, _cached_keys)]
    if len(updates) != 1:
        raise _refusal(part, f"hands keys to its cache {len(updates)} times")
    try:
        return gm, updates[0], find_index_scores(gm, updates[0])
    except NoIndexer as error:
        raise _refusal(part, f"has {error}") from error


def _refusal(part: nn.Module, reason: str) -> UnsupportedModelError:
    return UnsupportedModelError(
        f"{type(part).__name__} chooses the keys that attention sees in a way not known here: it "
        f"{reason}"
    )
