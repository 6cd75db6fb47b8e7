"""Load a model from a folder, a hub id, a GGUF file or memory, ready for the probe."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoTokenizer, PreTrainedConfig, PreTrainedModel

from ...errors import InvalidInputError, UnsupportedModelError
from ...kernels.matmul.quantized.quantized_weight import QuantizedWeight
from ..model.loaded import WHOLE, LoadedModel, Shard, longest_context
from .build_module import build_module, building
from .checkpoint import as_input_error, cause, code_not_run, needs_own_code
from .generation_config import default_sampling, end_tokens, ignored_settings, warn_of_dropped
from .gguf_blocks import check_gguf, kept_blocks
from .quantized_load import (
    check_capability,
    check_quantized,
    load_quantized,
    quantization_of,
    stays_quantised,
)
from .slices import build_slices
from .source import ModelSource, find_source
from .tensor_parallel import check_heads

_DTYPES = {
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
}
_LOAD_FORMATS = ("auto", "dummy")
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json")


def load_model(
    model: str | os.PathLike[str] | ModelSource | PreTrainedModel,
    *,
    dtype: str | torch.dtype = "auto",
    device: str | torch.device = "cpu",
    load_format: str = "auto",
    quantization: str | None = None,
    cache_dir: str | os.PathLike[str] | None = None,
    shard: Shard = WHOLE,
    keeps_head: bool = False,
    max_model_len: int | None = None,
) -> LoadedModel:
    """Load a causal language model.

    Args:
        model: a local folder, a hub id, a ``.gguf`` file, or a model that is already built. The
            latter is used as it is, and dtype applies only if it is not "auto". Or the result of
            :func:`.find_source`.
        dtype: "auto", "float32", "bfloat16" or "float16". "auto" is float32 on a CPU, and the
            config's dtype elsewhere.
        load_format: "auto" reads weights; "dummy" creates random ones (benchmarks, tests).
        quantization: "gguf" keeps the quantised weights of a GGUF file quantised in the captured
            graph, on a CPU. "fp8" quantises linear layers to e4m3, layer by layer. None follows the
            checkpoint.
        max_model_len: the longest context, for a model whose config gives none.
        cache_dir: folder of the conversion of a GGUF file; default ``$PAGESPEC_CACHE`` or
            ``~/.cache/pagespec``.
        shard: the part to load. Nothing else is read from files, or allocated.
        keeps_head: whether a rank also keeps the whole head, see :func:`.shard_model`.

    Raises:
        InvalidInputError: the model or its config is missing, weights are missing or incomplete, a
            file is damaged, or the dtype is unknown.
        UnsupportedModelError: transformers has no causal language model for the architecture, the
            model needs its own code, or it is an adapter.
    """
    device = torch.device(device)
    torch_dtype = _resolved_dtype(dtype)
    if load_format not in _LOAD_FORMATS:
        raise InvalidInputError("load_format", load_format, f"must be one of {_LOAD_FORMATS}")
    if quantization == "gguf":
        if device.type == "cpu" and torch_dtype not in (None, torch.float32):
            limit = f"needs dtype float32, or auto, on a CPU; dtype is {dtype!r}"
            raise InvalidInputError("quantization", quantization, limit)
        check_gguf(model.name if isinstance(model, ModelSource) else model, device)
        check_capability("int4", device)
    if isinstance(model, PreTrainedModel):
        if quantization is not None:
            limit = "needs a model in files: a module in memory has its weights already"
            raise InvalidInputError("quantization", quantization, limit)
        given: Any = model
        module: PreTrainedModel = given.to(device).eval()
        if torch_dtype is not None:
            _cast(module, torch_dtype)
        return _described(module, None, max_model_len)

    name, source, config = _config_of(model, cache_dir)
    is_quantised = quantization == "fp8" or (load_format == "auto" and stays_quantised(config))
    if is_quantised:
        check_quantized(name, config, quantization, torch_dtype, device, shard)
    if torch_dtype is None and quantization == "gguf" and device.type != "cpu":
        torch_dtype = torch.bfloat16  # its conversion is in float32
    torch_dtype = torch_dtype or dtype_of(config, dtype, device)
    options: dict[str, Any] = {}
    weights: Mapping[str, QuantizedWeight | None] = {}
    if is_quantised and load_format == "auto":
        with as_input_error(name, "must have safetensors weights that a model can be built from"):
            module, weights, scheme = load_quantized(source, name, config, torch_dtype, device)
        is_made = quantization_of(config) is None
        options = {"quantization": scheme, "is_quantized_at_load": is_made}
    elif quantization == "gguf":
        # Parameters are identified by their values, which are float32.
        module = build_module(source, name, config, torch.float32, torch.device("cpu"))
        weights = kept_blocks(Path(name), Path(source), module)
        _cast(module, torch_dtype)
        module = module.to(device)  # type: ignore[arg-type]
    elif shard.num_ranks == 1 and load_format == "auto":
        module = build_module(source, name, config, torch_dtype, device)
        module = module.to(device)  # type: ignore[arg-type]
    else:
        is_dummy = load_format == "dummy"
        with building(name, config, is_dummy=is_dummy):
            files = None if is_dummy else source
            module, cuts, head, made = build_slices(
                files,
                name,
                config,
                torch_dtype,
                device,
                shard,
                keeps_head=keeps_head,
                is_fp8=is_quantised,
            )
        options = {"shard": shard, "vocab_sizes": head.sizes, "cuts": cuts}
        options |= {"whole_head": head.whole}
        if made is not None:
            weights = made.weights
            options |= {"quantization": made.scheme.name, "is_quantized_at_load": True}
    options["files"] = source
    if load_format == "auto":
        options["names"] = partial(ModelSource(name, source).weight_names, quantization)
    described = replace(
        _described(module.eval(), _tokenizer(source, name), max_model_len), **options
    )
    for parameter, held in weights.items():
        if device.type == "cpu":
            described.quantized[parameter] = held
        elif held is not None:  # blocks other than 4 and 8 bits have the module's dtype
            described.quantized[parameter] = held.mapped(lambda part: part.to(device))
    return described


def dtype_of(
    config: PreTrainedConfig, dtype: str | torch.dtype, device: torch.device
) -> torch.dtype:
    """The dtype of a model's weights. ``dtype``: as of :func:`load_model`."""
    resolved = _resolved_dtype(dtype)
    if resolved is not None or device.type == "cpu":
        return resolved or torch.float32
    text_config = config.get_text_config(decoder=True)
    configured: Any = text_config.dtype or config.dtype or torch.bfloat16
    return configured  # type: ignore[no-any-return]


def read_config(model: ModelSource) -> PreTrainedConfig:
    """The config of a model that is not loaded. Raises as :func:`load_model`."""
    return _config_of(model, None)[2]


def vocab_size_of(model: str | os.PathLike[str]) -> int:
    """Rows of the LM head of a model that is not loaded. Raises as :func:`load_model`."""
    _, _, config = _config_of(model, None)
    return int(config.get_text_config(decoder=True).vocab_size)


def load_tokenizer(model: str | os.PathLike[str]) -> Any:
    """The tokenizer of a model that is not loaded. Raises as :func:`load_model`, or
    InvalidInputError if it has none."""
    name, source = find_source(model)
    found = _tokenizer(source, name)
    if found is None:
        raise InvalidInputError("tokenizer", name, "must be a model with a tokenizer")
    return found


def check_shared(model: str | os.PathLike[str], num_ranks: int) -> None:
    """Refuse a missing model, or one whose heads cannot be distributed over this many ranks. This
    takes a fraction of the time to start the ranks. Raises as :func:`load_model`."""
    _, _, config = _config_of(model, None)
    check_heads(config, num_ranks)


def _config_of(
    model: str | os.PathLike[str] | ModelSource, cache_dir: str | os.PathLike[str] | None
) -> tuple[str, str, PreTrainedConfig]:
    """A model's name, the folder or hub id that transformers reads, and its config."""
    name, source = model if isinstance(model, ModelSource) else find_source(model, cache_dir)
    with as_input_error(name, "must have a readable config.json"):
        try:
            # By default, transformers prompts on the terminal before it runs the model's code.
            return name, source, AutoConfig.from_pretrained(source, trust_remote_code=False)
        except (ValueError, KeyError) as error:
            if needs_own_code(error):
                raise code_not_run(name, "config") from error
            is_of_type = "model type" in str(error) or "model_type" in str(error)
            if is_of_type and not _has_config_of_other_form(source):
                raise UnsupportedModelError(f"{name}: {cause(error)}") from error
            raise


def _has_config_of_other_form(source: str) -> bool:
    """Whether a folder's config is not a JSON object: transformers 5.24 accepts an empty list."""
    path = Path(source) / "config.json"
    return path.is_file() and not isinstance(json.loads(path.read_text()), dict)


def _cast(module: PreTrainedModel, dtype: torch.dtype) -> None:
    """As ``module.to(dtype)``, except for buffers that no checkpoint contains. Rotary frequencies
    are float32 in a model of any dtype, and rounding them would shift every position."""
    saved = {id(tensor) for tensor in module.state_dict(keep_vars=True).values()}
    with torch.no_grad():
        for tensor in [*module.parameters(), *module.buffers()]:
            if tensor.is_floating_point() and id(tensor) in saved and tensor.dtype != dtype:
                tensor.data = tensor.data.to(dtype)


def _resolved_dtype(dtype: str | torch.dtype) -> torch.dtype | None:
    if dtype == "auto":
        return None
    found = _DTYPES.get(dtype) if isinstance(dtype, str) else dtype
    if found not in _DTYPES.values():
        raise InvalidInputError("dtype", dtype, f"must be 'auto' or one of {sorted(_DTYPES)}")
    return found


def _tokenizer(source: str, name: str) -> Any | None:
    folder = Path(source)
    is_local = folder.is_dir()
    if is_local and not any((folder / file).exists() for file in _TOKENIZER_FILES):
        return None
    with as_input_error(name, "must have a tokenizer that can be read, or none"):
        if name.endswith(".gguf"):
            from .gguf_tokenizer import read_tokenizer

            return read_tokenizer(folder)
        try:
            # Without clean-up, decoding is lossless, and text can be cut and joined anywhere.
            return AutoTokenizer.from_pretrained(
                source, clean_up_tokenization_spaces=False, trust_remote_code=False
            )
        except (OSError, ValueError) as error:
            if needs_own_code(error):
                raise code_not_run(name, "tokenizer") from error
            if is_local:
                raise
            return None  # the hub's answer if there is none


def _described(
    module: PreTrainedModel, tokenizer: Any | None, max_model_len: int | None
) -> LoadedModel:
    config = module.config
    text_config = config.get_text_config(decoder=True)
    generation_config = getattr(module, "generation_config", None)
    head = module.get_output_embeddings()
    if head is None or not hasattr(text_config, "vocab_size"):
        raise UnsupportedModelError(f"{type(module).__name__} has no language-model head")
    vocab_size = int(text_config.vocab_size)
    ends, dropped = end_tokens(generation_config, text_config, vocab_size)
    limit = longest_context(config) or max_model_len
    if limit is None:
        raise InvalidInputError(
            "max_model_len",
            None,
            f"must be given: the config of {type(module).__name__} names none",
        )
    warn_of_dropped(config.name_or_path, dropped, vocab_size)
    return LoadedModel(
        module,
        config,
        tokenizer,
        ends,
        vocab_size,
        limit,
        model_type=config.model_type,
        default_sampling=default_sampling(generation_config),
        ignored_settings=ignored_settings(generation_config, limit),
        dropped_eos_token_ids=dropped,
    )
