"""Makes the names of a checkpoint when they are first looked at: a restored start goes without
transformers' modeling code, which they need."""

from __future__ import annotations

from collections.abc import Callable

from ..fx.weights import WeightNames
from .source import ModelSource


def names_of(source: ModelSource, quantization: str | None) -> Callable[[], WeightNames]:
    """Args:
    quantization: as the caller has set it.
    """

    def make() -> WeightNames:
        if source.name.endswith(".gguf"):
            from .weight_names_gguf import GgufNames

            return GgufNames(source, keeps_blocks=quantization == "gguf")
        from .weight_names import FolderNames

        return FolderNames(source, quantization)

    return make
