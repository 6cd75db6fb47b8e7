"""Finds where a model's files are: a folder, a hub id, or the conversion of a GGUF file."""

from __future__ import annotations

import os
from pathlib import Path
from typing import NamedTuple

from ...errors import InvalidInputError, UnsupportedModelError
from ...validation import path_of
from .gguf import converted_folder

_ADAPTER = "adapter_config.json"  # of PEFT


class ModelSource(NamedTuple):
    """``name``: as the caller has it. ``files``: the folder or hub id that transformers reads."""

    name: str
    files: str


def find_source(
    model: str | os.PathLike[str], cache_dir: str | os.PathLike[str] | None = None
) -> ModelSource:
    """Convert a GGUF file, and refuse what is no model's name.

    Raises:
        InvalidInputError: there is no such file or folder, or it is not one of a model.
        UnsupportedModelError: a GGUF file that transformers cannot convert, or an adapter.
    """
    name = path_of(model)
    if name is None:
        raise InvalidInputError("model", model, "must be a folder, a .gguf file or a hub id")
    return ModelSource(name, _resolved(name, cache_dir))


def _resolved(name: str, cache_dir: str | os.PathLike[str] | None) -> str:
    """A folder or a hub id that transformers reads."""
    # os.path answers False where Path raises, over a name that is too long.
    if name.endswith(".gguf"):
        if not os.path.isfile(name):
            raise InvalidInputError("model", name, "must be an existing .gguf file")
        return str(converted_folder(Path(name), cache_dir))
    if os.path.isdir(name):
        # Without peft transformers would load the weights beside it and leave the adapter out.
        if os.path.isfile(os.path.join(name, _ADAPTER)):
            raise UnsupportedModelError(
                f"{name}: has an {_ADAPTER}, and LoRA and other adapters are not supported; "
                "merge the adapter into the weights"
            )
        if not os.path.isfile(os.path.join(name, "config.json")):
            raise InvalidInputError("model", name, "must be a folder with a config.json")
        return name
    if os.path.exists(name):
        raise InvalidInputError("model", name, "must be a folder, a .gguf file or a hub id")
    if name.count("/") > 1 or name.startswith((".", "~", "/")) or not name:
        raise InvalidInputError("model", name, "must be an existing folder or .gguf file")
    return name
