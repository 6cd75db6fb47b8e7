"""Shard a model over the ranks of a group by the plan that transformers carries for it.

Megatron-LM's tensor parallelism (Shoeybi et al. 2019). The layers before attention and before the
gated activation have a slice of their outputs, and the layers after them a slice of their inputs.
The results of the latter are summed over the ranks. Attention needs no change, because models view
by head size::

    x ──► q, k, v [columns r] ──► heads of rank r ──► o [rows r] ──► all_reduce ──► + x
    x ──► gate, up [columns r] ─────────────────────► down [rows r] ─► all_reduce ──► + x
    x ──► head [tokens r] ──► logits of rank r

The plan (``model.tp_plan``) gives a :class:`Style` per module or parameter: how it is sliced, and
the behaviour of its forward. The class of a style is inserted before a module's own class, so that
its forward ends in a collective. No code here is specific to one model, and the result can be
traced without a process group.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from ...errors import InvalidInputError, UnsupportedModelError
from ...kernels import ops
from ...kernels.sampling.sampler import GROUP
from ..model.loaded import Shard
from ..weights import Cut


class Reduced:
    """A module whose result is a partial sum."""

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        return ops.all_reduce(super().forward(*args, **kwargs))  # type: ignore[misc]


class RowParallel:
    """A linear layer over this rank's slice of the inputs."""

    weight: Tensor
    bias: Tensor | None

    def forward(self, x: Tensor) -> Tensor:
        total = ops.all_reduce(F.linear(x, self.weight))
        return total if self.bias is None else total + self.bias


class RowParallelSplit(RowParallel):
    """The same, with the full inputs."""

    pagespec_begin: int

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.narrow(-1, self.pagespec_begin, self.weight.shape[1]))


class ColumnParallelGathered:
    """A linear layer that computes its slice of the outputs and gathers all of them."""

    pagespec_sizes: list[int]

    def forward(self, x: Tensor) -> Tensor:
        return ops.all_gather(super().forward(x), self.pagespec_sizes)  # type: ignore[misc]


@dataclass(frozen=True, slots=True)
class Style:
    """How the parameters of a module are cut, in each of ``num_groups`` equal stretches, and the
    class that is inserted before the module's own."""

    along: Literal["outputs", "inputs"] | None = None
    forward: type | None = None
    num_groups: int = 1

    def dim(self, name: str, parameter: Tensor) -> int | None:
        """The dimension along which a parameter is cut; None if it is not."""
        if self.along == "outputs":
            return max(parameter.dim() - 2, 0)
        # A bias is added once, after the sum.
        return None if self.along is None or name == "bias" else parameter.dim() - 1


GATHERED = Style("outputs", ColumnParallelGathered)
SPLIT = Style("inputs", RowParallelSplit)
REPLICATED = Style()
STYLES = {
    "colwise": Style("outputs"),
    "rowwise": Style("inputs", RowParallel),
    "packed_colwise": Style("outputs", num_groups=2),
    "packed_rowwise": Style("inputs", RowParallel, num_groups=2),
    "colwise_gather_output": GATHERED,
    "colwise_rep": GATHERED,
    "rowwise_split_input": SPLIT,
    "rowwise_rep": SPLIT,
    "moe_tp_experts": Style(forward=Reduced),
    "all_reduce": Style(forward=Reduced),
    # Replicated on every rank. In training these reduce gradients; a lookup has no work to share.
    "replicated_with_grad_allreduce": REPLICATED,
    "mla_kv_a_proj": REPLICATED,
    "embedding_rowwise": REPLICATED,
    "embedding_colwise": REPLICATED,
    "replicate": REPLICATED,
    "local_params": REPLICATED,
}
# Layers whose outputs are heads, by the names that all models of transformers use.
_OF_ALL_HEADS = ("q_proj", "q_b_proj", "kv_b_proj", "query_key_value")
_OF_KV_HEADS = ("k_proj", "v_proj")
# Only linear layers have these forwards.
_OF_LINEAR = (RowParallel, ColumnParallelGathered)


def vocab_sizes(vocab_size: int, num_ranks: int) -> list[int] | None:
    """Tokens of the LM head per rank, in order: whole groups of the sampler, so that one rank has
    all tokens of a group. None if there are not enough groups for all ranks, and each has the whole
    head.
    """
    num_groups = -(-vocab_size // GROUP)
    if num_ranks == 1 or num_groups < num_ranks:
        return None
    ends = [min((r + 1) * num_groups // num_ranks * GROUP, vocab_size) for r in range(num_ranks)]
    return [end - begin for begin, end in zip([0, *ends], ends, strict=False)]


def check_heads(config: PreTrainedConfig, num_ranks: int) -> None:
    """Refuse, before anything is loaded, heads that :func:`shard_model` would refuse.

    Raises:
        InvalidInputError: the number of heads is not a multiple of ``tensor_parallel_size``.
    """
    text_config: Any = config.get_text_config(decoder=True)
    num_heads_of = _num_heads(text_config)
    for pattern, style in (text_config.base_model_tp_plan or {}).items():
        layer = pattern.rpartition(".")[2]
        num_heads = num_heads_of.get(layer)
        if num_heads and STYLES.get(style) is STYLES["colwise"]:
            _parts_of_heads(layer, num_heads, num_ranks, text_config.model_type)


def _num_heads(config: Any) -> dict[str, int | None]:
    """For the layers whose outputs are heads."""
    found = dict.fromkeys(_OF_ALL_HEADS, getattr(config, "num_attention_heads", None))
    return found | dict.fromkeys(_OF_KV_HEADS, getattr(config, "num_key_value_heads", None))


def _parts_of_heads(layer: str, num_heads: int, num_ranks: int, model: str) -> int:
    """The number of parts into which a layer is cut between its heads."""
    if num_heads % num_ranks == 0:
        return num_ranks
    if layer in _OF_KV_HEADS and num_ranks % num_heads == 0:
        return num_heads  # fewer than ranks: each has the head that its query heads read
    raise _indivisible(f"the {num_heads} heads of {layer}", num_ranks, model)


def _indivisible(what: str, num_ranks: int, model: str) -> InvalidInputError:
    return InvalidInputError("tensor_parallel_size", num_ranks, f"does not divide {what} ({model})")


class ShardedHead(NamedTuple):
    """The LM head of a sharded model.

    Attributes:
        sizes: tokens of each rank's part, see :func:`vocab_sizes`; None if every rank has all.
        whole: the head with the tokens of all ranks; None if the model's own has them, or if it is
            not kept.
    """

    sizes: list[int] | None
    whole: nn.Module | None


def shard_model(
    model: PreTrainedModel,
    shard: Shard,
    cuts: dict[str, Cut] | None = None,
    *,
    keeps_head: bool = False,
) -> ShardedHead:
    """Keep this rank's part of ``model``, in place, and make its modules reduce and gather.

    The parameters may be on the meta device; then nothing is allocated.

    Args:
        cuts: receives this rank's part of each parameter that is cut, by name.
        keeps_head: whether this rank also keeps the whole head. Its part is then a view of it.

    Raises:
        UnsupportedModelError: there is no plan, or it has an unknown style.
        InvalidInputError: the sizes to be shared are not multiples of ``tensor_parallel_size``.
    """
    plan, head = model.tp_plan or {}, model.get_output_embeddings()
    of_head = [name for name, module in model.named_modules() if module is head]
    if not any(
        STYLES.get(style, REPLICATED).forward for name, style in plan.items() if name not in of_head
    ):
        raise UnsupportedModelError(
            f"{type(model).__name__}: transformers {transformers.__version__} has no "
            "tensor-parallel plan for its layers"
        )
    sharder = _Sharder(model, plan, shard, {} if cuts is None else cuts, keeps_head)
    for name, module in list(model.named_modules()):
        sharder.shard_module(name, module)
    return ShardedHead(sharder.vocab_sizes, sharder.whole_head)


class _Sharder:
    def __init__(
        self,
        model: PreTrainedModel,
        plan: dict[str, str],
        shard: Shard,
        cuts: dict[str, Cut],
        keeps_head: bool,
    ) -> None:
        self._name, self._plan = type(model).__name__, plan
        self._shard, self._cuts = shard, cuts
        config: Any = model.config.get_text_config(decoder=True)
        self._num_heads = _num_heads(config)
        self._model: Any = model
        self._head, self._keeps_head = model.get_output_embeddings(), keeps_head
        self.vocab_sizes: list[int] | None = None
        self.whole_head: nn.Module | None = None

    def shard_module(self, name: str, module: nn.Module) -> None:
        style = self._style_of(name)
        is_head = module is self._head
        for parameter_name, parameter in list(module.named_parameters(recurse=False)):
            own = self._style_of(f"{name}.{parameter_name}") if name else None
            of_parameter = own or style or REPLICATED
            dim = of_parameter.dim(parameter_name, parameter)
            if is_head and dim is not None:
                sizes = self.vocab_sizes = vocab_sizes(parameter.shape[0], self._shard.num_ranks)
                part = parameter.detach()
                if sizes is not None:
                    begin = sum(sizes[: self._shard.rank])
                    span = begin, begin + sizes[self._shard.rank]
                    self._cuts[f"{name}.{parameter_name}"] = Cut(0, (span,))
                    if self._keeps_head:
                        self._keep_whole(module, parameter_name, part)
                    part = part.split(sizes)[self._shard.rank]
                    # A view keeps the whole tensor allocated, which only a whole head or an
                    # embedding with the same weights needs.
                    is_shared = self._keeps_head or self._is_embedded(part)
                    part = part if is_shared else part.clone()
            elif dim is None:
                part = parameter.detach()
            else:
                part = self._part(f"{name}.{parameter_name}", parameter, dim, of_parameter)
            if part is not parameter:
                kept = nn.Parameter(part, requires_grad=parameter.requires_grad)
                setattr(module, parameter_name, kept)
        if style is not None and style.forward is not None and not is_head:
            self._replace_forward(name, module, style.forward)

    def _keep_whole(self, head: nn.Module, name: str, parameter: Tensor) -> None:
        """Add a parameter to the whole head."""
        if self.whole_head is None:
            self.whole_head = copy.copy(head)
            self.whole_head._parameters = dict(head._parameters)
        self.whole_head._parameters[name] = nn.Parameter(parameter, requires_grad=False)

    def _is_embedded(self, part: Tensor) -> bool:
        """Whether the input embedding is stored in the same memory."""
        weight = getattr(self._model.get_input_embeddings(), "weight", part)
        return part.untyped_storage()._cdata == weight.untyped_storage()._cdata

    def _style_of(self, name: str) -> Style | None:
        pattern = ".".join("*" if part.isdecimal() else part for part in name.split("."))
        style = self._plan.get(pattern)
        if style is not None and style not in STYLES:
            raise UnsupportedModelError(
                f"{self._name}: its tensor-parallel plan has the style {style!r} for {pattern}"
            )
        return None if style is None else STYLES[style]

    def _part(self, name: str, parameter: Tensor, dim: int, style: Style) -> Tensor:
        """This rank's slice of a parameter."""
        rank, num_parts, num_groups = self._shard.rank, self._shard.num_ranks, style.num_groups
        size, layer = parameter.shape[dim], name.split(".")[-2]
        num_heads = self._num_heads.get(layer)
        if num_heads and style is not GATHERED:  # which may be cut within a head
            num_parts = _parts_of_heads(layer, num_heads, num_parts, self._name)
            rank = rank * num_parts // self._shard.num_ranks
        if size % (num_parts * num_groups):
            what = f"{name}, which has {size} in dimension {dim}"
            raise _indivisible(what, self._shard.num_ranks, self._name)
        length = size // num_groups
        begins = [g * length + rank * length // num_parts for g in range(num_groups)]
        self._cuts[name] = Cut(dim, tuple((b, b + length // num_parts) for b in begins))
        groups = parameter.detach().chunk(num_groups, dim)
        parts = [group.chunk(num_parts, dim)[rank] for group in groups]
        return torch.cat(parts, dim)  # a copy, so that the whole is freed

    def _replace_forward(self, name: str, module: nn.Module, forward: type) -> None:
        own: Any = type(module)
        if issubclass(forward, _OF_LINEAR) and not isinstance(module, nn.Linear):
            raise UnsupportedModelError(
                f"{self._name}: its plan shards {name}, a {own.__name__} and no nn.Linear"
            )
        sharded: Any = module
        if issubclass(forward, RowParallelSplit):
            sharded.pagespec_begin = self._shard.rank * sharded.weight.shape[1]
        if issubclass(forward, ColumnParallelGathered):
            sharded.pagespec_sizes = [sharded.weight.shape[0]] * self._shard.num_ranks
        sharded.__class__ = _in_front(forward, own)


@cache
def _in_front(forward: type, own: type) -> type:
    """The class ``own`` with the forward of ``forward``; one class for all modules of the same
    kind."""
    return type(f"{forward.__name__}{own.__name__}", (forward, own), {})
