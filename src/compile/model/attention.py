"""The attention function a Hugging Face model calls: store the new KV, then attend over pages.

It is registered with transformers' ``AttentionInterface``; all that changes from step to step
travels as keyword arguments through the model's ``forward`` (:data:`METADATA_KWARGS`), so that
they are plain inputs of the captured graph. What never changes is an :class:`AttentionSpec`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedConfig, PreTrainedModel

from ...errors import UnsupportedModelError
from ...kernels import ops

# Transformers treats names with "flash", "sdpa", "flex" or "/" in them specially.
ATTENTION_NAME = "pagespec"
METADATA_KWARGS = (
    "slot_mapping",
    "query_starts",
    "context_lens",
    "block_tables",
    "kv_caches",
    "attention_specs",
)


@dataclass(frozen=True, slots=True)
class AttentionSpec:
    """What one attention call of the model needs, found by the probe.

    Attributes:
        call: its number in order of execution, 0, 1, 2, ...; the same number is set on the
            attention module as ``pagespec_call``.
        num_q_heads, num_kv_heads: the latter before any repetition.
        k_dim, v_dim: head sizes of (query and) key, and of value.
        scale: factor on the scores.
        window: positions a query sees, itself included; 0 means all.
        softcap: cap on the scores, 0 for none.
        has_sinks: whether the call passes one learned sink logit a query head.
    """

    call: int
    num_q_heads: int
    num_kv_heads: int
    k_dim: int
    v_dim: int
    scale: float
    window: int = 0
    softcap: float = 0.0
    has_sinks: bool = False

    @property
    def num_kv_elements(self) -> int:
        """Elements of K and V a token leaves in the caches of this call."""
        return self.num_kv_heads * (self.k_dim + self.v_dim)


def paged_attention_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,  # noqa: ARG001 (models may pass it by name)
    *,
    slot_mapping: Tensor,
    query_starts: Tensor,
    context_lens: Tensor,
    block_tables: Tensor,
    kv_caches: Sequence[tuple[Tensor, Tensor]],
    attention_specs: Sequence[AttentionSpec],
    s_aux: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Transformers' attention contract: ``query [1, Hq, T, Dk]``, ``key [1, Hkv, T, Dk]``,
    ``value [1, Hkv, T, Dv]`` to ``([1, T, Hq, Dv], None)``.

    Scale, window and softcap come from the spec, which the probe took from the same arguments
    and from the model's mask; the remaining keyword arguments were vetted there.
    """
    call: int = module.pagespec_call  # type: ignore[assignment]
    spec = attention_specs[call]
    k_cache, v_cache = kv_caches[call]
    ops.kv_store(
        key.squeeze(0).transpose(0, 1),
        value.squeeze(0).transpose(0, 1),
        k_cache,
        v_cache,
        slot_mapping,
    )
    out = ops.paged_attention(
        query.squeeze(0).transpose(0, 1),
        k_cache,
        v_cache,
        query_starts,
        context_lens,
        block_tables,
        spec.scale,
        spec.window,
        spec.softcap,
        s_aux if spec.has_sinks else None,
    )
    return out.unsqueeze(0), None


AttentionInterface.register(ATTENTION_NAME, paged_attention_forward)


def _configs(module: PreTrainedModel) -> list[PreTrainedConfig]:
    """Every distinct config object that a module of the model holds."""
    found: dict[int, PreTrainedConfig] = {}
    for submodule in module.modules():
        config = getattr(submodule, "config", None)
        if isinstance(config, PreTrainedConfig):
            found[id(config)] = config
    return list(found.values())


@contextmanager
def attention_implementation(module: PreTrainedModel, name: str) -> Iterator[None]:
    """Have ``module`` call the attention function ``name`` inside the block; restore it after.

    The model may be the caller's own, and goes back to what it was.

    Raises:
        UnsupportedModelError: the model, or a part of it, does not take the implementation.
    """
    configs = _configs(module)
    before = [(config, config._attn_implementation_internal) for config in configs]
    try:
        module.set_attn_implementation(name)
        refused = [c.model_type for c in configs if c._attn_implementation != name]
        if refused:
            raise UnsupportedModelError(
                f"{type(module).__name__}: {', '.join(refused)} does not take its attention "
                "function from transformers' AttentionInterface"
            )
        yield
    finally:
        for config, implementation in before:
            config._attn_implementation_internal = implementation


def allocate_kv_caches(
    specs: Sequence[AttentionSpec],
    num_blocks: int,
    block_size: int,
    dtype: torch.dtype,
    device: torch.device | str,
) -> list[tuple[Tensor, Tensor]]:
    """One (K, V) pair of ``[num_blocks + 1, block_size, Hkv, D]`` an attention call.

    Zeroed, and with the null block as the last one.
    """

    def zeros(num_heads: int, dim: int) -> Tensor:
        shape = (num_blocks + 1, block_size, num_heads, dim)
        if torch.device(device).type != "cpu":
            return torch.zeros(shape, dtype=dtype, device=device)
        # numpy asks the system for zeroed pages, which take memory only once they are written;
        # torch.zeros would write them all now.
        pages = np.zeros(math.prod(shape) * dtype.itemsize, np.uint8)
        return torch.from_numpy(pages).view(dtype).view(shape)

    return [
        (zeros(spec.num_kv_heads, spec.k_dim), zeros(spec.num_kv_heads, spec.v_dim))
        for spec in specs
    ]
