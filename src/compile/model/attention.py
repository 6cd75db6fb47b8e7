"""Replace the attention, the recurrences and the indexers of a Hugging Face model by other
functions, and make it use the positions of packed tokens.

Two names are registered permanently with transformers' ``AttentionInterface``. Both stand for the
attention function of the thread. transformers creates masks only for the second one: creating them
reads positions, which a trace cannot do.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from transformers import (
    AttentionInterface,
    AttentionMaskInterface,
    PreTrainedConfig,
    PreTrainedModel,
)

from .current_step import ON_CACHES, Functions, Scope, current
from .forward import positions_inside
from .indexers import indexers_replaced
from .plain_attention import plain_attention_replaced
from .recurrent import recurrences_replaced

# transformers treats names that contain "flash", "sdpa", "flex" or "/" specially.
_NAME, _NAME_WITH_MASKS = "pagespec", "pagespec_masks"


def _attention(*args: Any, **kwargs: Any) -> tuple[Tensor, None]:
    return current.functions.attention(*args, **kwargs)


def _mask(*args: Any, **kwargs: Any) -> Tensor:
    """A mask of one element, for models that need a tensor although the function reads none."""
    mask = current.functions.mask
    if mask is None:
        return torch.zeros(1, 1, 1, 1, device=kwargs.get("device"))
    return mask(*args, **kwargs)


AttentionInterface.register(_NAME, _attention)
AttentionInterface.register(_NAME_WITH_MASKS, _attention)
AttentionMaskInterface.register(_NAME_WITH_MASKS, _mask)


def _configs(module: PreTrainedModel) -> list[PreTrainedConfig]:
    """Every distinct config object in a module of the model."""
    configs = (getattr(part, "config", None) for part in module.modules())
    return list({id(c): c for c in configs if isinstance(c, PreTrainedConfig)}.values())


@contextmanager
def attention_implementation(
    module: PreTrainedModel, functions: Functions = ON_CACHES
) -> Iterator[None]:
    """Within the context, make ``module`` call these functions in this thread; restore everything
    afterwards.

    The model may belong to the caller, so its original state is restored.

    Raises:
        UnsupportedModelError: the model does not support replacement, and its attention is not a
            plain softmax either.
    """
    configs = _configs(module)
    with Scope() as scope:
        for config in configs:
            scope.implementation([config], config._attn_implementation_internal)
        module.set_attn_implementation(_NAME)
        # Layers may have copies of the config, which transformers does not track.
        taken = {type(config) for config in configs if config._attn_implementation == _NAME}
        takers = [config for config in configs if type(config) in taken]
        needs_masks = functions.mask is not None
        if len(takers) < len(configs):
            needs_masks |= scope.enter_context(plain_attention_replaced(module, takers))
        scope.enter_context(positions_inside(module))
        scope.enter_context(recurrences_replaced(module))
        needs_masks |= scope.enter_context(indexers_replaced(module, configs, _NAME_WITH_MASKS))
        scope.set(current, "functions", functions)
        scope.implementation(configs, _NAME_WITH_MASKS if needs_masks else _NAME)
        yield
