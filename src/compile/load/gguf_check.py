"""Find what transformers would leave out of a GGUF file, so that such a file is refused.

transformers' reader silently skips tensors with unknown names, and keys that its table lacks. The
result would be another model.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from ...errors import UnsupportedModelError
from .gguf_vocabulary import open_gguf, read_values

_NO_SCALING = ("none", "linear")  # linear has an effect only by its factor
_ABOUT_TRAINING = ("original_context_length", "finetuned")
_MAX_NAMED = 5


def check_read_whole(path: Path, config: Any, module: Any) -> None:
    """Refuse a GGUF file with tensors or settings that have an effect and that transformers does
    not read.

    Args:
        config: as transformers has read it from the file. module: built from the config.

    Raises:
        UnsupportedModelError: names these tensors or settings.
        NotImplementedError: transformers has no table of the architecture's tensors.
    """
    reader = open_gguf(path)
    dropped = [*_dropped_tensors(reader, config, module), *_dropped_keys(reader, config)]
    if dropped:
        more = ", ..." if len(dropped) > _MAX_NAMED else ""
        raise UnsupportedModelError(
            f"{path.name}: transformers does not read {', '.join(dropped[:_MAX_NAMED])}{more}, "
            "and the model would be another without it"
        )


def processor_of(reader: Any, config: Any) -> Any:
    """The transformers object that converts the tensors of the file's architecture.

    Args:
        reader: from :func:`open_gguf`.
    """
    from transformers.modeling_gguf_pytorch_utils import TENSOR_PROCESSORS, TensorProcessor

    [architecture] = read_values(reader, "general.architecture")
    return TENSOR_PROCESSORS.get(architecture, TensorProcessor)(config=config.to_dict())


def _dropped_tensors(reader: Any, config: Any, module: Any) -> list[str]:
    from transformers.modeling_gguf_pytorch_utils import get_gguf_hf_weights_map

    known = get_gguf_hf_weights_map(module, processor_of(reader, config))
    # Experts stored together have no ".weight" in transformers.
    left = (
        tensor
        for tensor in reader.tensors
        if tensor.name not in known and tensor.name.removesuffix(".weight") not in known
    )
    return [tensor.name for tensor in left if not _does_nothing(tensor)]


def _does_nothing(tensor: Any) -> bool:
    """Whether it is a bias of zeros, or divides rotary frequencies by one."""
    is_bias = tensor.name.endswith(".bias")
    if not is_bias and not tensor.name.startswith("rope_"):
        return False
    from gguf.quants import dequantize

    values = dequantize(tensor.data, tensor.tensor_type)
    return bool(np.all(values == (0 if is_bias else 1)))


def _dropped_keys(reader: Any, config: Any) -> list[str]:
    [architecture] = read_values(reader, "general.architecture")
    text_config = config.get_text_config(decoder=True)
    found: list[str] = []
    if _has_default_rope(text_config):
        found += _scaling_keys(reader, architecture)
    key = f"{architecture}.attention.sliding_window"
    window = max(read_values(reader, key), default=0)
    longest = getattr(text_config, "max_position_embeddings", None)
    is_acting = window > 0 and (longest is None or window < longest)
    if is_acting and getattr(text_config, "sliding_window", None) != window:
        found.append(key)
    return found


def _scaling_keys(reader: Any, architecture: str) -> list[str]:
    prefix = f"{architecture}.rope.scaling."
    if read_values(reader, f"{prefix}type") == ["none"]:
        return []
    found = []
    for key in reader.fields:
        name = key.removeprefix(prefix)
        # Files had this key before the newer keys existed.
        if key == f"{architecture}.rope.scale_linear":
            name = "factor"
        elif not key.startswith(prefix) or name in _ABOUT_TRAINING:
            continue
        [value] = read_values(reader, key)
        if name == "type":
            is_acting = value not in _NO_SCALING
        else:
            # llama.cpp treats a factor of 0 as missing.
            is_acting = value != 1 and (name != "factor" or value != 0)
        if is_acting:
            found.append(key)
    return found


def _has_default_rope(config: Any) -> bool:
    """Whether no layer's rotary frequencies are scaled."""
    rope = getattr(config, "rope_parameters", None) or {}
    # One per type of layer, or one for all.
    parts = [part for part in rope.values() if isinstance(part, dict)] or [rope]
    return all(part.get("rope_type", "default") == "default" for part in parts)
