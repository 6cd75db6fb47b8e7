"""The attention function a Hugging Face model calls: store the new KV, then attend over pages.

It is registered with transformers' ``AttentionInterface``. What changes from step to step it finds
in :data:`.current_step.current`, set around the call of the model's ``forward``: many models hand
no keyword arguments down. In a trace these are plain inputs of the graph all the same. What never
changes is an :class:`AttentionSpec`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedConfig, PreTrainedModel

from ...kernels import ops
from .current_step import current
from .forward import positions_inside
from .indexers import IndexFunction, choose_on_caches, indexers_replaced
from .plain_attention import plain_attention_replaced
from .recurrent import RecurrentFunction, recurrences_replaced, run_on_states

# Transformers treats names with "flash", "sdpa", "flex" or "/" in them specially.
ATTENTION_NAME = "pagespec"


def paged_attention_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,  # noqa: ARG001 (models may pass it by name)
    *,
    s_aux: Tensor | None = None,
    indices: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Transformers' attention contract: ``query [1, Hq, T, Dk]``, ``key [1, Hkv, T, Dk]``,
    ``value [1, Hkv, T, Dv]`` to ``([1, T, Hq, Dv], None)``.

    Scale, mask, softcap and slopes come from the spec, which the probe took from the same arguments
    and from the model's mask; the remaining keyword arguments were vetted there.
    """
    assert current.step is not None
    inputs, kv_caches, specs = current.step.inputs, current.step.kv_caches, current.step.specs
    turns = current.step.turns
    call: int = module.pagespec_call  # type: ignore[assignment]
    if hasattr(module, "pagespec_calls"):
        turn = turns.get(call, 0)
        turns[call] = turn + 1
        calls: Any = module.pagespec_calls
        call = calls[turn]
    spec = specs[call]
    k_cache, v_cache = kv_caches[call][:2]
    ops.kv_store(
        key.squeeze(0).transpose(0, 1),
        value.squeeze(0).transpose(0, 1),
        k_cache,
        v_cache,
        inputs.slot_mapping,
    )
    out = ops.paged_attention(
        query.squeeze(0).transpose(0, 1),
        k_cache,
        v_cache,
        inputs.query_starts,
        inputs.context_lens,
        inputs.block_tables,
        inputs.table_rows,
        spec.scale,
        spec.window,
        spec.softcap,
        s_aux if spec.has_sinks else None,
        spec.chunk,
        spec.alibi_slopes or None,
        None if indices is None else indices.squeeze(0),
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
def attention_implementation(
    module: PreTrainedModel,
    name: str,
    recurrence: RecurrentFunction = run_on_states,
    choose: IndexFunction = choose_on_caches,
) -> Iterator[None]:
    """Have ``module`` call the attention function ``name``, ``recurrence`` for each recurrence and
    ``choose`` for each indexer inside the block; restore all after.

    The model may be the caller's own, and goes back to what it was.

    Raises:
        UnsupportedModelError: the model does not take it, nor is its attention plainly a softmax.
    """
    configs = _configs(module)
    before = [(config, config._attn_implementation_internal) for config in configs]
    try:
        module.set_attn_implementation(name)
        # Layers may hold copies of the config, which transformers does not know of.
        taken = {type(config) for config in configs if config._attn_implementation == name}
        for config in configs:
            if type(config) in taken:
                config._attn_implementation_internal = name
        others = [config for config in configs if config._attn_implementation != name]
        takers = [config for config in configs if config._attn_implementation == name]
        with ExitStack() as stack:
            if others:
                stack.enter_context(plain_attention_replaced(module, name, takers))
                for config in others:
                    config._attn_implementation_internal = name
            stack.enter_context(positions_inside(module))
            stack.enter_context(recurrences_replaced(module, recurrence))
            stack.enter_context(indexers_replaced(module, name, configs, choose))
            yield
    finally:
        for config, implementation in before:
            config._attn_implementation_internal = implementation
