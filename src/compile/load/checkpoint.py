"""Read the tensors of a folder's safetensors files by name, and refuse damaged files."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from ...errors import InvalidInputError, PagespecError, UnsupportedModelError, shortened

_ONE, _INDEX = "model.safetensors", "model.safetensors.index.json"
NUM_READERS = 4
# Not caused by the files: a device without memory, or a device error.
_PASSED_ON = (PagespecError, MemoryError, torch.OutOfMemoryError, torch.AcceleratorError)
_NO_MEMORY_ON_CPU = "can't allocate memory"  # torch raises a plain RuntimeError there
_MAX_CAUSE = 200  # characters


def files_of(source: str, **options: Any) -> Path:
    """A folder, or the folder of a hub id; ``options`` are for downloading it."""
    if Path(source).is_dir():
        return Path(source)
    from huggingface_hub import snapshot_download

    return Path(snapshot_download(source, **options))


def weight_files(source: str) -> list[Path] | None:
    """The safetensors files of a folder or of a hub id's folder in the cache; None if it is not
    there.

    Raises:
        OSError, ValueError, KeyError: there are no such files, or their index is damaged.
    """
    folder = Path(source)
    if not folder.is_dir():
        from huggingface_hub import try_to_load_from_cache

        found = [try_to_load_from_cache(source, name) for name in (_ONE, _INDEX)]
        known = [Path(path) for path in found if isinstance(path, str)]
        if not known:
            return None
        folder = known[0].parent
    return [folder / name for name in _file_names(folder)]


def _file_names(folder: Path) -> list[str]:
    if (folder / _ONE).is_file():
        return [_ONE]
    return sorted(set(json.loads((folder / _INDEX).read_bytes())["weight_map"].values()))


class Checkpoint:
    """The weights in ``folder``, from the files that transformers would read.

    Raises:
        OSError: there are no weights.
        Exception: of any type, if a file is damaged.
    """

    def __init__(self, folder: Path) -> None:
        self._get: dict[str, Callable[[str], Tensor]] = {}
        for file in _file_names(folder):
            opened = safe_open(folder / file, framework="pt")
            self._get |= dict.fromkeys(opened.keys(), opened.get_tensor)

    def __contains__(self, name: object) -> bool:
        return name in self._get

    @property
    def names(self) -> Iterable[str]:
        """The names of all tensors."""
        return self._get.keys()

    def get(self, name: str) -> Tensor:
        """The tensor as stored in the file, in the file's memory."""
        return self._get[name](name)

    def read(self, name: str, dtype: torch.dtype, device: torch.device) -> Tensor:
        """The tensor in this dtype. On a CPU, a tensor that already has it stays in the file's
        memory."""
        return self.get(name).to(device=device, dtype=dtype)

    def read_all(
        self, names: Iterable[tuple[str, torch.dtype]], device: torch.device
    ) -> list[Tensor]:
        """Read tensors in order, with parallel reads, because copies to a device wait for the
        disk."""
        with ThreadPoolExecutor(NUM_READERS) as readers:
            return list(readers.map(lambda of: self.read(of[0], of[1], device), names))


class CheckpointPart(Checkpoint):
    """Some tensors of a checkpoint under other names.

    Args:
        whole: the checkpoint. names: its name of each tensor, by the new name.
    """

    def __init__(self, whole: Checkpoint, names: Mapping[str, str]) -> None:
        self._get = {name: partial(_read_as, whole._get[old], old) for name, old in names.items()}


def _read_as(read: Callable[[str], Tensor], old: str, _new: str) -> Tensor:
    return read(old)


def check_float(name: str, tensor: Tensor, shape: tuple[int, ...] = ()) -> None:
    """Raise ValueError unless the tensor has finite floats, and this shape if one is given."""
    if tensor.dtype not in (torch.float32, torch.float16, torch.bfloat16):
        raise ValueError(f"{name} is {form_of(tensor)}; known are float32, float16 and bfloat16")
    if shape and tuple(tensor.shape) != shape:
        raise ValueError(f"{name} is {form_of(tensor)}, not of shape {shape}")
    if not bool(tensor.isfinite().all()):
        raise ValueError(f"{name} has NaN or infinity")


def form_of(tensor: Tensor) -> str:
    """Dtype and shape, for messages."""
    return f"{str(tensor.dtype).removeprefix('torch.')} {tuple(tensor.shape)}"


@contextmanager
def as_input_error(model: str, limit: str) -> Iterator[None]:
    """Convert errors in the context to a refusal of ``model`` that names the cause.

    Parsers of configs, weights and tokenizers raise many types of errors for a damaged file:
    KeyError, struct.error, ZeroDivisionError and their own.

    Raises:
        InvalidInputError: ``limit`` states what the model's files must be.
    """
    try:
        yield
    except _PASSED_ON:
        raise
    except Exception as error:
        if _NO_MEMORY_ON_CPU in str(error):
            raise
        raise InvalidInputError("model", model, f"{limit} ({cause(error)})") from error


def needs_own_code(error: Exception) -> bool:
    """Whether transformers would require ``trust_remote_code``."""
    return "trust_remote_code" in str(error)


def code_not_run(model: str, what: str) -> UnsupportedModelError:
    """The refusal of a model whose files name their own code for its ``what``."""
    return UnsupportedModelError(
        f"{model}: its {what} needs Python code that comes with the model (auto_map). Such code "
        "is not run: trust_remote_code is not supported"
    )


def cause(error: Exception) -> str:
    """An error as one line."""
    return shortened(f"{type(error).__name__}: {' '.join(str(error).split())}", _MAX_CAUSE)
