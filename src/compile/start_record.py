"""Start records: the results of a start for a model, stored on disk for the next start.

A start builds a model's module, probes it and traces it. The results depend only on the model's
files, the code of its classes and the settings of the process. If these are unchanged, the next
start *restores* the model: it reads the tensors by name, and the graph. It needs neither the module
nor transformers' modeling code, whose imports take longer than everything else.

A record is written for a folder (or a GGUF file's conversion) if the module has exactly the tensors
in its files. Each tensor, and each quantised weight, is first compared bit by bit
(:mod:`.start_tensors`). Values that the module has computed, such as the frequencies of a rotary
embedding, are stored in the record.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
import transformers

from ..disk_cache import read_json, write_json
from ..kernels.attention.attention_spec import AttentionSpec
from ..kernels.recurrent.recurrent_spec import RecurrentSpec
from .capture.graph_json import Traced, decode
from .capture.process_key import (
    NoName,
    code_of_classes,
    code_of_file,
    code_of_module,
    digest_of,
    process_parts,
)
from .load.generation_config import warn_of_dropped
from .load.gguf_blocks import check_gguf
from .load.source import ModelSource
from .model.loaded import LoadedModel, TensorTree, longest_context
from .start_tensors import (
    NotRestorable,
    describe_tensors,
    quantized_weights,
    read_tensors,
    weights_differ,
)
from .step_fields import FIELDS, Field, input_keys

logger = logging.getLogger("pagespec")

_VERSION = 6
_MAX_RECORDS = 64
# Where a program registers its own classes for a type of model.
_REGISTRY = "transformers.models.auto.modeling_auto"
# Attributes of a loaded model that are plain data.
_PLAIN = (
    *("model_type", "vocab_size", "max_position_embeddings", "quantization", "default_sampling"),
    *("ignored_settings", "dropped_eos_token_ids"),
)


@dataclass(frozen=True, slots=True)
class Restored:
    """A model without its module, and its traced graph."""

    loaded: LoadedModel
    specs: list[AttentionSpec]
    traced: Traced


class StartRecord:
    """The record of one model's starts.

    Args:
        folder: of all records. graphs: of the graph cache.
        source: the model, in a local folder.
        dtype, quantization: as set by the caller.
        is_compiled: whether the graph may be passed to a compiler.
        fields: fields of its steps.
    """

    def __init__(
        self,
        folder: Path,
        graphs: Path,
        source: ModelSource,
        *,
        dtype: str,
        device: torch.device,
        is_compiled: bool,
        quantization: str | None = None,
        fields: Sequence[Field] = FIELDS,
    ) -> None:
        self._name, self._graphs, self._source = source.name, graphs, Path(source.files)
        self._device, self._is_compiled = device, is_compiled
        self._quantization = quantization
        # The state before anything of the model is imported.
        self._key = digest_of(_parts(self._source, dtype, quantization, device, input_keys(fields)))
        self._folder = folder

    def restore(self) -> Restored | None:
        """The model from the record of an earlier start; None if there is none, or if anything has
        changed."""
        if self._key is None:
            return None
        try:
            noted = read_json(self._folder, self._key)
            _check_code(noted["code"])
            return self._restored(noted)
        except FileNotFoundError:
            return None
        # Whatever is wrong with the record, building the module either works or reports the cause
        # better.
        except Exception as error:
            logger.info("the record of %s is not used: %s", self._source, error)
            return None

    def _restored(self, noted: dict[str, Any]) -> Restored:
        if self._quantization == "gguf":
            check_gguf(self._name, self._device)  # which also begins to build its kernels
        tensors = read_tensors(self._source, noted["tensors"], self._device)
        graph = read_json(self._graphs, noted["graph"])
        traced = decode(graph, tensors, is_symbolic=self._is_compiled)
        tree: Any = TensorTree(noted["architecture"], tensors.items())
        source = ModelSource(self._name, str(self._source))
        config: Any = None
        loaded = LoadedModel(
            tree,
            config,
            self._tokenizer(noted["tokenizer"]),
            frozenset(noted["eos_token_ids"]),
            **{name: noted[name] for name in _PLAIN},
            names=partial(source.weight_names, self._quantization),
        )
        # Loading also logs this, but this start skips it.
        warn_of_dropped(str(self._source), loaded.dropped_eos_token_ids, loaded.vocab_size)
        weights = quantized_weights(self._source, tensors, self._quantization)
        loaded.quantized.update(weights)
        loaded.recurrent[:] = map(RecurrentSpec.from_json, noted["recurrent"])
        return Restored(loaded, [_spec(noted_spec) for noted_spec in noted["specs"]], traced)

    def _tokenizer(self, noted: Sequence[str] | None) -> Any:
        if noted is None:
            return None
        return _read_tokenizer(getattr(import_module(noted[0]), noted[1]), self._source)

    def describe(
        self, loaded: LoadedModel, specs: Sequence[AttentionSpec]
    ) -> dict[str, Any] | None:
        """The results of a start for a model that is not captured yet (the capture changes it);
        None if the next start could not restore the model."""
        if self._key is None:
            return None
        module = loaded.module
        try:
            if longest_context(loaded.config) is None:
                raise NotRestorable("its longest context is the caller's")
            tensors = list(describe_tensors(module, self._source))
            differing = weights_differ(module, loaded.quantized, self._source, self._quantization)
            if differing is not None:
                raise NotRestorable(f"{differing} is not what its files have")
            return {name: getattr(loaded, name) for name in ("architecture", *_PLAIN)} | {
                "eos_token_ids": sorted(loaded.eos_token_ids),
                "tokenizer": self._describe_tokenizer(loaded.tokenizer),
                "specs": [asdict(spec) for spec in specs],
                "recurrent": [asdict(spec) for spec in loaded.recurrent],
                "tensors": tensors,
                "code": code_of_classes({type(part) for part in module.modules()}),
            }
        except (NotRestorable, NoName, OSError) as error:
            logger.info("the start of %s is not stored: %s", self._source, error)
            return None

    def write(self, described: dict[str, Any] | None, graph_key: str | None) -> None:
        """Store the result of :meth:`describe`, with the key of the model's graph."""
        if self._key is None or described is None or graph_key is None:
            return
        try:
            write_json(self._folder, self._key, described | {"graph": graph_key})
            # A moved or changed folder leaves a record that is never read again.
            records = self._folder.glob("*.json")
            newest = sorted(records, key=lambda file: file.stat().st_mtime_ns, reverse=True)
            for file in newest[_MAX_RECORDS:]:
                file.unlink(missing_ok=True)
        except OSError as error:
            logger.info("the start of %s is not stored: %s", self._source, error)

    def _describe_tokenizer(self, tokenizer: Any) -> list[str] | None:
        if tokenizer is None:
            return None
        cls = type(tokenizer)
        if not hasattr(tokenizer, "backend_tokenizer"):
            raise NotRestorable(f"its tokenizer is a {cls.__name__}")
        again = _read_tokenizer(cls, self._source)
        if _tokenizer_state(again) != _tokenizer_state(tokenizer):
            raise NotRestorable("its tokenizer is not what its class reads")
        return [cls.__module__, cls.__qualname__]


def _spec(noted: dict[str, Any]) -> AttentionSpec:
    return AttentionSpec(**{**noted, "alibi_slopes": tuple(noted["alibi_slopes"])})


def may_restore() -> bool:
    """Whether no model can have been registered with transformers in this process yet."""
    return _REGISTRY not in sys.modules


def _parts(
    source: Path, dtype: str, quantization: str | None, device: torch.device, inputs: list[Any]
) -> Iterator[object]:
    yield _VERSION, str(source.resolve()), dtype, quantization, transformers.__file__, inputs
    yield from process_parts(device)
    for entry in sorted(os.scandir(source), key=lambda entry: entry.name):
        status = entry.stat()
        yield entry.name, status.st_size, status.st_mtime_ns, entry.is_file()


def _check_code(noted: Sequence[Sequence[Any]]) -> None:
    """Refuse code that has changed: in the file and, if it is imported, in memory."""
    for name, file, of_file, of_module in noted:
        imported = code_of_module(name) if name in sys.modules else [name, file, of_file, of_module]
        if code_of_file(file) != of_file or imported != [name, file, of_file, of_module]:
            raise NotRestorable(f"{name} has changed")


def _read_tokenizer(cls: Any, source: Path) -> Any:
    return cls.from_pretrained(
        str(source), clean_up_tokenization_spaces=False, trust_remote_code=False
    )


def _tokenizer_state(tokenizer: Any) -> tuple[object, ...]:
    return (
        tokenizer.backend_tokenizer.to_str(),
        repr(sorted(tokenizer.init_kwargs.items())),
        repr(tokenizer.special_tokens_map),
        tokenizer.chat_template,
        tokenizer.padding_side,
        tokenizer.truncation_side,
    )
