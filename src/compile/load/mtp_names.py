"""Names of the tensors of multi-token prediction layers in checkpoints, for N layers of the model::

model.layers.N.{enorm, hnorm, eh_proj, shared_head.norm, ...}     DeepSeek V3, GLM 4.5 and later
mtp.{fc, pre_fc_norm_embedding, pre_fc_norm_hidden, norm, layers.0...}   Qwen3-Next, Qwen3.5
"""

from __future__ import annotations

import re

_OWN = {"enorm", "hnorm", "eh_proj"}
# Copies of tensors of the model, which are ignored.
_COPIES = ("embed_tokens.", "shared_head.head.", "lm_head.")
_OF_QWEN = {
    "fc": "eh_proj",
    "pre_fc_norm_embedding": "enorm",
    "pre_fc_norm_hidden": "hnorm",
    "norm": "post_norm",
}
_LAYER = "layers.0."


def is_of_mtp(name: str, num_layers: int) -> bool:
    """Whether a checkpoint's tensor or layer belongs to multi-token prediction, not to the model.

    Args:
        num_layers: of the model.
    """
    if re.match(r"(?:model\.)?mtp[._]", name):
        return True
    match = re.match(r"(?:model\.)?(?:language_model\.)?layers\.(\d+)\.", name)
    return match is not None and int(match[1]) >= num_layers


def parameter_of(name: str, num_layers: int) -> str | None:
    """The parameter of :class:`.MtpHead`, or of its unconverted experts, that a checkpoint's tensor
    becomes; None if it is no tensor of the first layer, or a copy of one of the model.

    Args:
        num_layers: of the model.
    """
    match = re.match(rf"(?:model\.)?(?:language_model\.)?layers\.{num_layers}\.(.*)", name)
    if match is not None:
        rest = match[1].replace("shared_head.norm.", "post_norm.")
        is_own = rest.partition(".")[0] in {*_OWN, "post_norm"}
        return (
            None if rest.startswith(_COPIES) else _LAYER + ("" if is_own else "mtp_block.") + rest
        )
    match = re.match(r"(?:model\.)?mtp\.(.*)", name)
    if match is None or match[1].startswith(_COPIES):
        return None
    first, _, rest = match[1].partition(".")
    if first in _OF_QWEN:
        return f"{_LAYER}{_OF_QWEN[first]}.{rest}"
    return f"{_LAYER}mtp_block.{rest[2:]}" if match[1].startswith("layers.0.") else None
