"""Names of vLLM that stand for unsupported features."""

from __future__ import annotations

from typing import Any

from ..errors import InvalidInputError

_POOLING = "embeddings, classification and pooling are not supported"
_LORA = "LoRA adapters are not supported: merge the adapter into the weights"

REFUSED = {
    "PoolingParams": _POOLING,
    "PoolingOutput": _POOLING,
    "PoolingRequestOutput": _POOLING,
    "EmbeddingOutput": _POOLING,
    "EmbeddingRequestOutput": _POOLING,
    "ClassificationOutput": _POOLING,
    "ClassificationRequestOutput": _POOLING,
    "ScoringOutput": f"{_POOLING}; LLM.score gives log-probabilities of prompts, as ScoreOutput",
    "ScoringRequestOutput": (
        f"{_POOLING}; LLM.score gives log-probabilities of prompts, as ScoreOutput"
    ),
    "print_embeddings": _POOLING,
    "ModelRegistry": "models are traced from transformers: register the class there",
    "initialize_ray_cluster": "ranks are processes of this host: use tensor_parallel_size",
}
"""By name: why an import fails, and the replacement."""


_NO_MEDIA = "images, audio and video are not supported: prompts are texts or token ids"

REFUSED_MODULES = {"assets": _NO_MEDIA, "multimodal": _NO_MEDIA}
"""By the last part of a module's name: why its import fails."""


def refuse_module(module: str) -> None:
    """
    Raises:
        ImportError: always.
    """
    reason = REFUSED_MODULES[module.rpartition(".")[2]]
    raise ImportError(f"cannot import {module!r}: {reason}", name=module)


def attribute(module: str, name: str) -> Any:
    """The ``__getattr__`` of a module that lacks a name.

    Raises:
        ImportError: the name is in :data:`REFUSED`. ``from MODULE import NAME`` would replace an
            AttributeError by one without the reason.
        AttributeError: any other name.
    """
    if name in REFUSED:
        raise ImportError(f"cannot import name {name!r} from {module!r}: {REFUSED[name]}")
    raise AttributeError(f"module {module!r} has no attribute {name!r}")


class LoRARequest:
    """Refused: making one raises InvalidInputError. The class serves annotations."""

    def __init__(self, *given: Any, **named: Any) -> None:
        raise InvalidInputError("lora_request", named or given, _LORA)
