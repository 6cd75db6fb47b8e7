"""The location of a model's files: a folder, a hub id, or the conversion of a GGUF file."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from ...errors import InvalidInputError
from ...model_name import check_model_path
from ...params.checks import path_of
from ..weights import WeightNames
from .gguf import converted_folder


class ModelSource(NamedTuple):
    """``name``: as passed by the caller. ``files``: the folder or hub id that transformers
    reads."""

    name: str
    files: str

    def weight_names(self, quantization: str | None) -> WeightNames:
        """The names of the checkpoint's tensors, for the weight map. Imports transformers' modeling
        code, which a restored start does not need.

        Args:
            quantization: as set by the caller.
        """
        if self.name.endswith(".gguf"):
            from .weight_names_gguf import GgufNames

            return GgufNames(*self)
        from .weight_names import FolderNames

        return FolderNames(*self, quantization)


def find_source(
    model: str | os.PathLike[str],
    cache_dir: str | os.PathLike[str] | None = None,
    check_conversion: Callable[[Path], None] | None = None,
) -> ModelSource:
    """Find a model's files. Converts a GGUF file, and refuses what is not a model's name.

    Args:
        check_conversion: called with a GGUF file before its conversion; it may refuse the file.

    Raises:
        InvalidInputError: there is no such file or folder, or it does not contain a model.
        UnsupportedModelError: a GGUF file that transformers cannot convert, or an adapter.
    """
    name = path_of(model)
    if name is None:
        raise InvalidInputError("model", model, "must be a folder, a .gguf file or a hub id")
    if not check_model_path(name) or not name.endswith(".gguf"):
        return ModelSource(name, name)
    return ModelSource(name, str(converted_folder(Path(name), cache_dir, check_conversion)))
