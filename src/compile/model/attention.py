"""The attention function a Hugging Face model calls: store the new KV, then attend over pages.

It is registered with transformers' ``AttentionInterface``; all that changes from step to step
travels as keyword arguments through the model's ``forward`` (:data:`METADATA_KWARGS`), so that
they are plain inputs of the captured graph. What never changes is an :class:`AttentionSpec`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedConfig, PreTrainedModel

from ...errors import UnsupportedModelError
from ...kernels import ops
from ...kernels.attention.spec import AttentionSpec

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
