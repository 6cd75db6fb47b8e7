"""Write GGUF files with the quantised weights of a tiny model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType, GGUFWriter
from gguf.quants import dequantize, quantize
from tokenizers import Tokenizer, models
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from pagespec.compile.load import gguf
from tests.support.models import VOCAB_SIZE, tiny_model

# Rows are whole blocks of 32. The head is wider, as files have it.
SIZES = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "head_dim": 16}


def write_model(path: Path, format: str = "Q4_1", head: str = "Q8_0") -> PreTrainedModel:
    """Write a file at ``path`` and return a model with the values that it contains. The rows of
    queries have another order in the file, as some architectures' converters write them."""
    model = tiny_model("llama", **SIZES)
    writer = GGUFWriter(path, "llama")
    for number, (name, parameter) in enumerate(model.named_parameters()):
        if parameter.dim() != 2:
            continue
        kind = GGMLQuantizationType[head if "head" in name or "embed" in name else format]
        blocks = quantize(parameter.detach().numpy(), kind)
        with torch.no_grad():
            parameter.copy_(torch.from_numpy(dequantize(blocks, kind)))
        if "q_proj" in name:
            blocks = np.ascontiguousarray(blocks[::-1])
        writer.add_tensor(f"tensor.{number}", blocks, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return model


def gguf_model(folder: Path, patch: pytest.MonkeyPatch, format: str = "Q4_1") -> str:
    """The path of a GGUF file whose conversion is replaced by an exact one."""
    path = folder / "tiny.gguf"
    model = write_model(path, format)

    def convert(_: Path, made: Path) -> None:
        model.save_pretrained(made)
        vocabulary = {"<unk>": 0} | {f"word{i}": i for i in range(1, VOCAB_SIZE)}
        words = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
        PreTrainedTokenizerFast(tokenizer_object=words).save_pretrained(made)

    patch.setattr(gguf, "_convert", convert)
    patch.setenv("PAGESPEC_CACHE", str(folder / "cache"))
    return str(path)


def write_vocabulary(path: Path, *, arch: str = "llama", **vocabulary: Any) -> Path:
    """A GGUF file with only a tokenizer; arguments as for :func:`add_vocabulary`."""
    writer = GGUFWriter(path, arch)
    add_vocabulary(writer, **vocabulary)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def add_vocabulary(
    writer: GGUFWriter,
    model: str | None,
    tokens: Sequence[str] = (),
    types: Sequence[int] | None = None,
    scores: Sequence[float] | None = None,
    merges: Sequence[str] | None = None,
    keys: Mapping[str, Any] | None = None,
) -> None:
    """The ``tokenizer.ggml`` keys of a file; those that are None or empty are left out.

    Args:
        types: of each token.
        keys: more keys, as ``{"tokenizer.ggml.pre": "qwen2", "tokenizer.ggml.eos_token_id": 2}``.
    """
    if model is not None:
        writer.add_tokenizer_model(model)
    if tokens:
        writer.add_token_list(list(tokens))
    if types is not None:
        writer.add_token_types(list(types))
    if scores is not None:
        writer.add_token_scores(list(scores))
    if merges is not None:
        writer.add_token_merges(list(merges))
    add: dict[type, Any] = {bool: writer.add_bool, int: writer.add_uint32, str: writer.add_string}
    for key, value in (keys or {}).items():
        add.get(type(value), writer.add_array)(key, value)
