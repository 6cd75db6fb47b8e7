"""A second form of a graph, whose last layer computes only the tokens whose logits are kept.

::

    query ─► attention ─► linear, norm, ... ─► hidden ─► keep_rows ─► head
    query ─► keep ─► attention of kept queries ─► linear, norm, ... ─► head

The selection is hoisted over every call that computes a token from that token alone, up to the last
attention and over it: the query of a kept token becomes a row of one query, like that of a decode
step. Keys and values of all tokens are stored as before. All other calls are those of the first
form, compiled regions included, so a kept token gets the same bits in both.

A call is hoisted over if its name is in :data:`TOKENWISE`, if its result has the tokens in order
as one dimension, and if it reads nothing else that changes from step to step. Other calls
(recurrences, attention over selected positions, native stretches) compute all tokens as before.
"""

from __future__ import annotations

import logging
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node
from torch.utils._pytree import tree_leaves

from ...kernels.arguments import LatentKV, PagedKV
from ...kernels.attention import cpu_invariant, reference, reference_layout
from ...kernels.attention.backend import AttentionBackend
from ...kernels.attention.kept_rows import kept_rows
from ...kernels.fused import dispatch as fused
from ...kernels.mla import dispatch as mla
from ..fx.nodes import (
    CASTS,
    calls_function,
    erase_unused,
    example,
    is_in_place,
    is_ours,
    tensor_of,
    written_nodes,
)
from .split_head import keep_rows

logger = logging.getLogger("pagespec")

_RESHAPES = frozenset({"view", "reshape", "flatten", "unflatten"})
_VIEWS = _RESHAPES | {
    "transpose", "permute", "squeeze", "unsqueeze", "split", "chunk", "contiguous", "getitem",
}  # fmt: skip
_ELEMENTWISE = CASTS | {
    "add", "sub", "mul", "truediv", "neg", "pow", "square", "sqrt", "rsqrt", "exp", "sigmoid",
    "tanh", "silu", "gelu", "relu", "clamp", "where", "cat", "elementwise",
}  # fmt: skip
_NORMS = frozenset({"mean", "softmax", "layer_norm", "rms_norm", "add_rms_norm", "gated_rms_norm"})
_MATMULS = frozenset(
    {
        "linear", "linear_few_rows", "linear_silu_mul", "linear_norm", "norm_linear",
        "add_norm_linear", "act_linear", "mlp", "linear_of_rows", "linear_int4", "linear_fp8",
        "linear_float16",
    }
)  # fmt: skip
# A token's result depends on the experts of that token only, not on the order of their rows.
_EXPERTS = frozenset(
    {
        "route", "route_rows", "sort_by_expert", "spread_rows", "grouped_mm", "combine_experts",
        "combine_add_rms_norm",
    }
)  # fmt: skip
_LATENTS = frozenset({"latent_query", "rope_latent_query", "head_values"})
_COLLECTIVES = frozenset({"all_reduce", "all_reduce_norm", "all_gather"})
TOKENWISE = (
    _VIEWS | _ELEMENTWISE | _NORMS | {"act_mul"} | _MATMULS | _EXPERTS | _LATENTS | _COLLECTIVES
)
"""Names of calls that compute each token of their result from that token alone."""
_MODULES = ("torch", "_operator", "pagespec.")
_LAYOUTS: dict[Any, int] = {cpu_invariant.build_layout: 1, reference_layout.build_layout: 2}
"""Functions that build layouts, and the place of ``query_starts`` among their arguments."""
_ON_LAYOUT = (cpu_invariant.attend, reference.attend)


def keep(x: Tensor, dim: int, tokens: Tensor) -> Tensor:
    """Some tokens of ``x``, whose dimension ``dim`` are tokens; contiguous."""
    return x.index_select(dim, tokens)


def hoist_keep_rows(
    gm: GraphModule, sources: Sequence[tuple[Any, ...]], attention: AttentionBackend | None
) -> Callable[..., Any] | None:
    """The second form of a graph with exposed hidden states; None if it would save no matmul.

    The function takes the same arguments, with ``logits_to_keep`` as in :func:`.kept_rows`. It
    returns (logits, ...) without the hidden states. Run it after all passes and regions.

    Args:
        sources: of all placeholders, see :meth:`.dynamo.Traced.arguments`.
        attention: of the graph on a GPU.
    """
    graph = Graph()
    results: Any = graph.graph_copy(gm.graph, {})
    graph.output((results[0], *results[2:]))
    places = [node for node in graph.nodes if node.op == "placeholder"]
    if not _Hoist(graph, dict(zip(places, sources, strict=True)), attention).run():
        return None
    graph.lint()
    return GraphModule(gm, graph).forward


class _Hoist:
    """One run over a graph, which it changes."""

    def __init__(
        self,
        graph: Graph,
        sources: Mapping[Node, tuple[Any, ...]],
        attention: AttentionBackend | None,
    ) -> None:
        self._graph, self._sources, self._attention = graph, sources, attention
        (self._cut,) = (node for node in graph.nodes if calls_function(node, keep_rows))
        self._hidden: Any
        self._hidden, self._tokens = self._cut.args  # type: ignore[assignment]
        value = tensor_of(self._hidden)
        assert value is not None, "Dynamo recorded it"
        self._num_tokens = str(value.shape[1])
        self._first = next(node for node in graph.nodes if node.op != "placeholder")
        self._written = written_nodes(graph)
        self._constants: dict[Node, bool] = {}
        self._copies: dict[Node, Node] = {}
        self._batches: dict[tuple[Node, ...], list[Node]] = {}

    def run(self) -> bool:
        """Whether matmuls have moved. If not, the graph is as before."""
        moved = sorted(self._movable())
        if self._hidden not in moved or not any(_name(node) in _MATMULS for node in moved):
            logger.debug("the last layer has no form for kept rows: %s", self._hidden)
            return False
        with self._graph.inserting_before(self._cut):
            self._num_kept = self._graph.call_method("size", (self._tokens, 0))
            for node in moved:
                is_attention = self._query(node) is not None
                copy = self._attention_of_kept(node) if is_attention else self._copy(node)
                self._copies[node] = copy
        self._cut.replace_all_uses_with(self._copies[self._hidden])
        self._graph.erase_node(self._cut)
        erase_unused(self._graph, [*moved, self._num_kept])
        return True

    # Calls that can move ------------------------------------------------------------------------

    def _movable(self) -> set[Node]:
        """Calls that can be computed for kept tokens alone, and whose results only those need, or
        which are views and sizes."""
        refused: set[Node] = set()
        while True:
            moved: set[Node] = set()
            needed = {self._cut}
            for node in reversed(self._graph.nodes):
                users = node.users
                if node in refused or not (needed & users.keys() or moved & users.keys()):
                    continue
                read = [user for user in users if self._reads_kept(user, node)]
                if not self._is_allowed(node):
                    continue
                if len(read) == len(node.users) and needed.issuperset(read):
                    needed.add(node)
                    moved.add(node)
                elif not moved.isdisjoint(read) and self._is_strided_view(node):
                    moved.add(node)
            worse = {node for node in moved if not self._has_inputs(node, moved)}
            if not worse:
                return moved
            refused |= worse

    def _inputs(self, node: Node) -> Sequence[Node]:
        """What a moved call reads: of tokens only the kept ones, of a step nothing else."""
        query = self._query(node)
        if query is None:
            return node.all_input_nodes
        return [] if self._is_storing(node) else [query]

    def _reads_kept(self, user: Node, node: Node) -> bool:
        return user is self._cut or node in self._inputs(user)

    def _has_inputs(self, reader: Node, moved: set[Node]) -> bool:
        """Whether all inputs of a moved call can be had for the kept tokens."""

        def can_be_had(node: Node) -> bool:
            if node in moved or self._is_constant(node) or self._is_starts(node):
                return True
            if self._is_num_tokens(node):
                return True
            value = tensor_of(node)
            if value is None or self._token_dim(node) is None or node in self._written:
                return False
            # Compiled regions need the strides of the first form.
            return self._query(reader) is not None or value.is_contiguous()

        return all(map(can_be_had, self._inputs(reader)))

    def _is_allowed(self, node: Node) -> bool:
        if node in self._written:
            return False
        return self._query(node) is not None or self._is_tokenwise(node)

    def _is_tokenwise(self, node: Node) -> bool:
        region = getattr(node.target, "region", None)
        if region is not None:
            calls = [n for n in region.nodes if n.op not in ("placeholder", "output")]
            return all(map(self._is_tokenwise, calls))
        if not _is_named(node) or is_in_place(node) or self._is_num_tokens(node):
            return False
        value, inputs = example(node), node.all_input_nodes
        if calls_function(node, operator.getitem) and len(inputs) > 1:
            return False  # an index may change the order of tokens
        if value is None:
            return is_ours(node) or node.op == "call_method"
        if not isinstance(value, Tensor):
            return True
        if self._token_dim(node, is_any=True) is None:
            return is_ours(node) or not any(map(self._mentions_tokens, (node, *inputs)))
        return all(self._keeps_order(node, source) for source in inputs)

    def _keeps_order(self, node: Node, source: Node) -> bool:
        """Whether a call has the tokens of ``source`` in the same order."""
        value, result = tensor_of(source), tensor_of(node)
        if value is None or result is None:
            return True  # one of several results, or a size
        before, after = (self._token_dim(n, is_any=True) for n in (source, node))
        if before is None or after is None:
            return not self._mentions_tokens(source)
        if _name(node) in _RESHAPES:
            return _product(value.shape[:before]) == _product(result.shape[:after])
        if _name(node) == "softmax":
            dim = node.kwargs.get("dim", node.args[1] if len(node.args) > 1 else None)
            return isinstance(dim, int) and dim % value.dim() != before
        return True

    def _token_dim(self, node: Node, *, is_any: bool = False) -> int | None:
        """The only dimension of a result whose size depends on the number of tokens, if it is that
        number, or ``is_any``."""
        value = tensor_of(node)
        if value is None:
            return None
        found = [dim for dim, size in enumerate(value.shape) if self._is_of_tokens(size)]
        if len(found) != 1 or not (is_any or str(value.shape[found[0]]) == self._num_tokens):
            return None
        return found[0]

    def _mentions_tokens(self, node: Node) -> bool:
        tensors = [leaf for leaf in tree_leaves(example(node)) if isinstance(leaf, Tensor)]
        return any(self._is_of_tokens(size) for tensor in tensors for size in tensor.shape)

    def _is_of_tokens(self, size: object) -> bool:
        if not isinstance(size, torch.SymInt):
            return False
        return self._num_tokens in map(str, size.node.expr.free_symbols)

    def _is_num_tokens(self, node: Node) -> bool:
        value = example(node)
        return isinstance(value, torch.SymInt) and str(value) == self._num_tokens

    def _is_strided_view(self, node: Node) -> bool:
        """Whether a copy of some of its tokens would have other strides; or a size."""
        value = example(node)
        is_strided = not isinstance(value, Tensor) or not value.is_contiguous()
        return isinstance(value, torch.SymInt) or (_name(node) in _VIEWS and is_strided)

    def _is_starts(self, node: Node) -> bool:
        return self._sources.get(node) == ("input", "query_starts")

    def _is_constant(self, node: Node) -> bool:
        known = self._constants.get(node)
        if known is None:
            if node.op == "placeholder":
                known = self._sources[node][0] == "constant"
            else:
                known = node not in self._written
                known = known and all(map(self._is_constant, node.all_input_nodes))
            self._constants[node] = known
        return known

    # Attention ----------------------------------------------------------------------------------

    def _is_storing(self, node: Node) -> bool:
        """Whether it is an attention call that stores keys and values first."""
        by = self._attention
        return by is not None and node.target in _with_quantizing(by, by.fused_rope_attention)

    def _query(self, node: Node) -> Any:
        """The query of an attention call that can be computed for some tokens, or None."""
        args: Any = node.args
        if calls_function(node, *_ON_LAYOUT):
            is_plain = calls_function(args[3], *_LAYOUTS) and args[4].indices is None
            return args[0] if is_plain else None
        if calls_function(node, mla.attention):
            return args[0] if len(args) < 5 or args[4] is None else None
        by = self._attention
        if by is None or node.op != "call_function":
            return None
        if self._is_storing(node):
            return args[0].query
        return args[0] if node.target in _with_quantizing(by, by.attend) else None

    def _attention_of_kept(self, node: Node) -> Node:
        graph, by, args = self._graph, self._attention, node.args
        kept = None if self._is_storing(node) else self._kept(args[0])
        target: Any = node.target
        kv: Any
        layout: Any
        if target in _ON_LAYOUT:
            query, k_cache, v_cache, layout, *rest = args
            begin = _LAYOUTS[layout.target]
            built = [kept if argument is query else argument for argument in layout.args]
            built[begin : begin + 4] = self._batch(built[begin : begin + 4])
            own = graph.call_function(layout.target, tuple(built))
            return graph.call_function(target, (kept, k_cache, v_cache, own, *rest))
        if target is mla.attention:
            _, kv, *rest = args
            latent = LatentKV(kv.cache, *self._batch(kv[1:]))
            return graph.call_function(target, (kept, latent, *rest))
        assert by is not None, "it is a call of the backend"
        if kept is None:
            inputs, slots, kv, params = args[:4]
            target = by.attend if target == by.fused_rope_attention else by.quantizing[by.attend]
            with graph.inserting_before(node):  # calls in between may read the cache
                query = graph.call_function(
                    fused.norm_rope_store, (inputs, kv.k_cache, kv.v_cache, slots)
                )
            kept = graph.call_function(keep, (query, 0, self._tokens))
        else:
            _, kv, params = args[:3]
        own_kv = PagedKV(kv.k_cache, kv.v_cache, *self._batch(kv[2:]))
        return graph.call_function(target, (kept, own_kv, params))

    def _batch(self, batch: Sequence[Any]) -> list[Any]:
        """Starts, contexts, tables and table rows of the kept tokens, from those of a call."""
        starts, contexts, tables, rows = batch
        key = starts, contexts, rows
        if key not in self._batches:
            with self._graph.inserting_before(self._first):
                made = self._graph.call_function(kept_rows, (self._tokens, *key))
                self._batches[key] = [
                    self._graph.call_function(operator.getitem, (made, place)) for place in range(3)
                ]
        starts, contexts, rows = self._batches[key]
        return [starts, contexts, tables, rows]

    # Copies -------------------------------------------------------------------------------------

    def _copy(self, node: Node) -> Node:
        return self._graph.node_copy(node, self._kept)

    def _kept(self, node: Any) -> Node:
        """``node`` for the kept tokens."""
        if node in self._copies:
            return self._copies[node]
        if self._is_constant(node):
            return node
        if self._is_num_tokens(node):
            return self._num_kept
        if self._is_starts(node):
            inputs = {source[1]: n for n, source in self._sources.items() if source[0] == "input"}
            names = ("query_starts", "context_lens", "block_tables", "table_rows")
            return self._batch([inputs[name] for name in names])[0]
        # Selected as soon as computed: kernels that overlap read such inputs before they wait for
        # the preceding kernel.
        after = self._first if node.op == "placeholder" else node.next
        with self._graph.inserting_before(after):
            self._copies[node] = self._graph.call_function(
                keep, (node, self._token_dim(node), self._tokens)
            )
        return self._copies[node]


def _with_quantizing(by: AttentionBackend, function: Any) -> list[Any]:
    """An attention function, and its version that quantises."""
    if function is None:
        return []
    return [function, *([by.quantizing[function]] if function in by.quantizing else [])]


def _name(node: Node) -> str:
    target: Any = node.target
    return target if isinstance(target, str) else getattr(target, "__name__", "")


def _is_named(node: Node) -> bool:
    if node.op == "call_method":
        return node.target in TOKENWISE
    module = getattr(node.target, "__module__", None) or ""
    return node.op == "call_function" and _name(node) in TOKENWISE and module.startswith(_MODULES)


def _product(sizes: Sequence[Any]) -> str:
    product: Any = 1
    for size in sizes:
        product = product * size
    return str(product)
