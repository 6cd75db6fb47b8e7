"""Start records: what one start finds out about a model, kept on the disk for the next.

A start builds a model's module, probes it and traces it. All that depends on the model's files, the
code of its classes and the settings of the process. Where these are as they were, the next start
*restores* the model: it reads the tensors by name, and the graph, and does without the module and
without transformers' modeling code, whose imports take longer than all the rest.

A record is written for a folder (or a GGUF file's conversion) whose module holds exactly the
tensors in its files: each is compared, bit by bit, before. What the module has computed, such as
the frequencies of a rotary embedding, is in the record.
"""

from __future__ import annotations

import base64
import json
import logging
import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn

from ..disk_cache import read_sealed, write_sealed
from ..kernels.attention.spec import AttentionSpec
from .capture.graph_file import read_graph
from .capture.process_key import (
    code_of_file,
    code_of_module,
    digest_of,
    file_of_module,
    modules_of,
    process_parts,
)
from .capture.traced import Traced
from .model.checkpoint import Checkpoint
from .model.loaded import LoadedModel, TensorTree, named_tensors

logger = logging.getLogger("pagespec")

_VERSION = 1
_OWN_FOLDERS = ("capture", "fx", "model")
_MAX_COMPUTED_BYTES = 1 << 20
_MAX_RECORDS = 64
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
# Where a program registers classes of its own for a type of model.
_REGISTRY = "transformers.models.auto.modeling_auto"


class _NotRestorable(Exception):
    """The next start could not restore this model from its files."""


@dataclass(frozen=True, slots=True)
class Restored:
    """A model without its module, and the graph that was traced of it."""

    loaded: LoadedModel
    specs: list[AttentionSpec]
    traced: Traced


class StartRecord:
    """The record of one model's starts.

    Args:
        folder: of all records. graphs: of the graph cache.
        source: the model's folder.
        dtype: as the caller has set it.
        is_compiled: whether a compiler may be given the graph.
    """

    def __init__(
        self,
        folder: Path,
        graphs: Path,
        source: Path,
        *,
        dtype: str,
        device: torch.device,
        is_compiled: bool,
    ) -> None:
        self._graphs, self._source, self._device = graphs, source, device
        self._is_compiled = is_compiled
        # As it is before anything of the model is imported.
        self._key = digest_of(_parts(source, dtype, device))
        self._file = folder / f"{self._key}.json"

    def restore(self) -> Restored | None:
        """The model as it was started before; None if it was not, or anything has changed."""
        if self._key is None:
            return None
        try:
            noted = json.loads(read_sealed(self._file, self._key))
            _check_code(noted["code"])
            return self._restored(noted)
        except FileNotFoundError:
            return None
        # Whatever is wrong with it, the module will do, or say better what is wrong.
        except Exception as error:
            logger.info("the record of %s is not used: %s", self._source, error)
            return None

    def _restored(self, noted: dict[str, Any]) -> Restored:
        tensors = self._read_tensors(noted["tensors"])
        traced = read_graph(self._graphs, noted["graph"], tensors, is_symbolic=self._is_compiled)
        tree: Any = TensorTree(noted["architecture"], tensors.items())
        nothing: Any = None
        loaded = LoadedModel(
            tree,
            nothing,
            self._tokenizer(noted["tokenizer"]),
            frozenset(noted["eos_token_ids"]),
            noted["vocab_size"],
            noted["max_position_embeddings"],
            model_type=noted["model_type"],
        )
        return Restored(loaded, [AttentionSpec(**spec) for spec in noted["specs"]], traced)

    def _read_tensors(self, noted: Sequence[Any]) -> dict[str, Tensor]:
        dtypes = {name: getattr(torch, where[1]) for name, where, *_ in noted if where[0] == "file"}
        read = Checkpoint(self._source).read_all(dtypes.items(), self._device)
        weights = dict(zip(dtypes, read, strict=True))
        tensors: dict[str, Tensor] = {}
        for name, where, is_parameter, requires_grad in noted:
            kind, *rest = where
            if kind == "same":
                tensors[name] = tensors[rest[0]]
                continue
            value = weights[name] if kind == "file" else _computed(*rest).to(self._device)
            tensors[name] = nn.Parameter(value, requires_grad) if is_parameter else value
        return tensors

    def _tokenizer(self, noted: Sequence[str] | None) -> Any:
        if noted is None:
            return None
        return _read_tokenizer(getattr(import_module(noted[0]), noted[1]), self._source)

    def write(
        self, loaded: LoadedModel, specs: Sequence[AttentionSpec], graph_key: str | None
    ) -> None:
        """Keep what a start has found out, if the next could restore it."""
        if self._key is None or graph_key is None:
            return
        module = loaded.module
        code = sorted(modules_of({type(part) for part in module.modules()}))
        try:
            noted = {
                "architecture": loaded.architecture,
                "model_type": loaded.model_type,
                "eos_token_ids": sorted(loaded.eos_token_ids),
                "vocab_size": loaded.vocab_size,
                "max_position_embeddings": loaded.max_position_embeddings,
                "tokenizer": self._describe_tokenizer(loaded.tokenizer),
                "specs": [asdict(spec) for spec in specs],
                "graph": graph_key,
                "tensors": list(self._describe_tensors(module)),
                "code": [
                    [name, file := file_of_module(name), code_of_file(file), code_of_module(name)]
                    for name in code
                ],
            }
            body = json.dumps(noted, separators=(",", ":")).encode()
            write_sealed(self._file, self._key, body)
            _forget_oldest(self._file.parent)
        except (_NotRestorable, OSError) as error:
            logger.info("the start of %s is not kept: %s", self._source, error)

    def _describe_tensors(self, module: nn.Module) -> Iterator[list[Any]]:
        checkpoint = Checkpoint(self._source)
        first: dict[int, str] = {}
        memory: set[int] = set()
        for name, tensor in named_tensors(module):
            if id(tensor) in first:
                yield [name, ["same", first[id(tensor)]], False, False]
                continue
            first[id(tensor)] = name
            if type(tensor) not in (Tensor, nn.Parameter) or not tensor.is_contiguous():
                raise _NotRestorable(f"{name} is no plain tensor")
            if tensor.numel() and tensor.data_ptr() in memory:
                raise _NotRestorable(f"{name} shares its memory")
            memory.add(tensor.data_ptr())
            dtype = str(tensor.dtype).removeprefix("torch.")
            where: list[Any]
            if name in checkpoint:
                # Where a GPU's memory, which is about to be measured, plays no part.
                value = tensor.detach().cpu()
                if not _is_same(checkpoint.read(name, value.dtype, value.device), value):
                    raise _NotRestorable(f"{name} is not what its file has")
                where = ["file", dtype]
            elif tensor.nbytes <= _MAX_COMPUTED_BYTES:
                content = bytes(_bits(tensor).cpu().reshape(-1).view(torch.uint8).numpy())
                text = base64.b64encode(content).decode()
                where = ["computed", dtype, list(tensor.shape), text]
            else:
                raise _NotRestorable(f"{name} is in no file")
            yield [name, where, isinstance(tensor, nn.Parameter), tensor.requires_grad]

    def _describe_tokenizer(self, tokenizer: Any) -> list[str] | None:
        if tokenizer is None:
            return None
        cls = type(tokenizer)
        if not hasattr(tokenizer, "backend_tokenizer"):
            raise _NotRestorable(f"its tokenizer is a {cls.__name__}")
        again = _read_tokenizer(cls, self._source)
        if _tokenizer_state(again) != _tokenizer_state(tokenizer):
            raise _NotRestorable("its tokenizer is not what its class reads")
        return [cls.__module__, cls.__qualname__]


def _forget_oldest(folder: Path) -> None:
    """A folder that was moved or changed leaves a record that nothing asks for any more."""
    records = sorted(folder.glob("*.json"), key=lambda file: file.stat().st_mtime_ns)
    for file in records[:-_MAX_RECORDS]:
        file.unlink(missing_ok=True)


def may_restore() -> bool:
    """Whether the process can have told transformers nothing about models yet."""
    return _REGISTRY not in sys.modules


def _parts(source: Path, dtype: str, device: torch.device) -> Iterator[object]:
    yield _VERSION, str(source.resolve()), dtype, transformers.__file__
    yield from process_parts(device)
    for entry in sorted(os.scandir(source), key=lambda entry: entry.name):
        status = entry.stat()
        yield entry.name, status.st_size, status.st_mtime_ns, entry.is_file()
    home = Path(__file__).parent
    own = [file for name in _OWN_FOLDERS for file in sorted((home / name).glob("*.py"))]
    yield [(file.name, code_of_file(str(file))) for file in (Path(__file__), *own)]


def _check_code(noted: Sequence[Sequence[Any]]) -> None:
    """Refuse code that is not what it was: in the file and, where it is imported, in memory."""
    for name, file, of_file, of_module in noted:
        is_same = code_of_file(file) == of_file
        if is_same and name in sys.modules:
            now = code_of_module(name)
            is_same = file_of_module(name) == file and now is not None and now == of_module
        if not is_same:
            raise _NotRestorable(f"{name} has changed")


def _computed(dtype: str, shape: Sequence[int], text: str) -> Tensor:
    content = bytearray(base64.b64decode(text))
    flat = torch.frombuffer(content, dtype=getattr(torch, dtype)) if content else torch.empty(0)
    return flat.to(getattr(torch, dtype)).reshape(shape).clone()


def _bits(tensor: Tensor) -> Tensor:
    return tensor.detach().view(_BITS[tensor.dtype.itemsize])


def _is_same(one: Tensor, other: Tensor) -> bool:
    return one.shape == other.shape and torch.equal(_bits(one), _bits(other))


def _read_tokenizer(cls: Any, source: Path) -> Any:
    return cls.from_pretrained(str(source), clean_up_tokenization_spaces=False)


def _tokenizer_state(tokenizer: Any) -> tuple[object, ...]:
    return (
        tokenizer.backend_tokenizer.to_str(),
        repr(sorted(tokenizer.init_kwargs.items())),
        repr(tokenizer.special_tokens_map),
        tokenizer.chat_template,
        tokenizer.padding_side,
        tokenizer.truncation_side,
    )
