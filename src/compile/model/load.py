"""Loads a model from a folder, a hub id, a GGUF file or memory, ready for the probe."""

from __future__ import annotations

import importlib.util
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedConfig,
    PreTrainedModel,
)

from ...errors import InvalidInputError, UnsupportedModelError
from .gguf_blocks import check_quantization, kept_blocks
from .loaded import WHOLE, LoadedModel, Shard
from .refusal import as_input_error, cause
from .source import ModelSource, find_source
from .tensor_parallel import check_heads, shard_model

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
) -> LoadedModel:
    """Load a causal language model.

    Args:
        model: a local folder, a hub id, a ``.gguf`` file, or a model already built (then it is
            used as it is, and dtype applies only if it is not "auto"); or what was found of it.
        dtype: "auto", "float32", "bfloat16" or "float16"; "auto" is float32 on CPU and what the
            config says elsewhere.
        load_format: "auto" reads weights; "dummy" makes random ones (benchmarks, tests).
        quantization: None, or "gguf": what a GGUF file holds quantised is to stay so in the graph
            that is captured, on a CPU.
        cache_dir: where a GGUF file's conversion is kept; default ``$PAGESPEC_CACHE`` or
            ``~/.cache/pagespec``.
        shard: the part to load; of files, nothing else is read. With more than one rank all of them
            load at a time, in one process group.

    Raises:
        InvalidInputError: nothing there, no config, no or incomplete weights, a file that is
            damaged, unknown dtype.
        UnsupportedModelError: an architecture transformers has no causal language model for.
    """
    device = torch.device(device)
    torch_dtype = _resolved_dtype(dtype)
    if load_format not in _LOAD_FORMATS:
        raise InvalidInputError("load_format", load_format, f"must be one of {_LOAD_FORMATS}")
    if quantization is not None:
        named = model.name if isinstance(model, ModelSource) else model
        check_quantization(quantization, named, device)
    if isinstance(model, PreTrainedModel):
        given: Any = model
        module: PreTrainedModel = given.to(device).eval()
        if torch_dtype is not None:
            _cast(module, torch_dtype)
        return _described(module, tokenizer=None)

    name, source, config = _config_of(model, cache_dir)
    if torch_dtype is None:
        text_config = config.get_text_config(decoder=True)
        configured: Any = text_config.dtype or config.dtype or torch.bfloat16
        torch_dtype = torch.float32 if device.type == "cpu" else configured
    module = _built(source, name, config, torch_dtype, load_format, device, shard)
    vocab_sizes = shard_model(module, shard) if shard.num_ranks > 1 else None
    described = _described(module.to(device).eval(), _tokenizer(source, name))  # type: ignore[arg-type]
    described = replace(described, shard=shard, vocab_sizes=vocab_sizes)
    if quantization is not None:
        described.quantized.update(kept_blocks(Path(name), Path(source), module))
    return described


def vocab_size_of(model: str | os.PathLike[str]) -> int:
    """Rows of the head of a model that is not loaded. Raises as :func:`load_model`."""
    _, _, config = _config_of(model, None)
    return int(config.get_text_config(decoder=True).vocab_size)


def check_shared(model: str | os.PathLike[str], num_ranks: int) -> None:
    """Refuses a model that is not there, or whose heads so many ranks cannot share; in a fraction
    of the time that it takes to start them. Raises as :func:`load_model`."""
    _, _, config = _config_of(model, None)
    check_heads(config, num_ranks)


def _config_of(
    model: str | os.PathLike[str] | ModelSource, cache_dir: str | os.PathLike[str] | None
) -> tuple[str, str, PreTrainedConfig]:
    """A model's name, the folder or hub id that transformers reads, and its config."""
    name, source = model if isinstance(model, ModelSource) else find_source(model, cache_dir)
    with as_input_error(name, "must have a readable config.json"):
        try:
            return name, source, AutoConfig.from_pretrained(source)
        except (ValueError, KeyError) as error:
            if "model type" in str(error) or "model_type" in str(error):
                raise UnsupportedModelError(f"{name}: {cause(error)}") from error
            raise


def _cast(module: PreTrainedModel, dtype: torch.dtype) -> None:
    """As ``module.to(dtype)``, but buffers that no checkpoint holds stay what they are: rotary
    frequencies are float32 in a model of any dtype, and rounded they shift every position."""
    saved = {id(tensor) for tensor in module.state_dict(keep_vars=True).values()}
    with torch.no_grad():
        for tensor in [*module.parameters(), *module.buffers()]:
            if tensor.is_floating_point() and id(tensor) in saved and tensor.dtype != dtype:
                tensor.data = tensor.data.to(dtype)


def _resolved_dtype(dtype: str | torch.dtype) -> torch.dtype | None:
    if isinstance(dtype, torch.dtype) and dtype in _DTYPES.values():
        return dtype
    if dtype == "auto":
        return None
    if isinstance(dtype, str) and dtype in _DTYPES:
        return _DTYPES[dtype]
    raise InvalidInputError("dtype", dtype, f"must be 'auto' or one of {sorted(_DTYPES)}")


def _built(
    source: str,
    name: str,
    config: PreTrainedConfig,
    dtype: torch.dtype,
    load_format: str,
    device: torch.device,
    shard: Shard,
) -> PreTrainedModel:
    is_dummy = load_format == "dummy"
    limit = "must have a config.json" if is_dummy else "must have weights"
    with as_input_error(name, f"{limit} that a model can be built from"):
        try:
            if is_dummy:
                return _dummy(config, dtype, device)
            return _read(source, name, config, dtype, device, shard)
        except ValueError as error:
            if "Unrecognized configuration class" in str(error):
                kind = type(config).__name__
                raise UnsupportedModelError(
                    f"{name}: transformers has no causal language model for {kind}"
                ) from error
            raise


def _dummy(config: PreTrainedConfig, dtype: torch.dtype, device: torch.device) -> PreTrainedModel:
    devices = [device] if device.type == "cuda" else []
    # Made where they will be: a CPU takes minutes over the random numbers of a large model.
    with torch.random.fork_rng(devices=devices), device:
        torch.manual_seed(0)
        module: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=dtype)
    return module


def _read(
    source: str,
    name: str,
    config: PreTrainedConfig,
    dtype: torch.dtype,
    device: torch.device,
    shard: Shard,
) -> PreTrainedModel:
    # With accelerate, the weights go straight from the file to the device.
    has_accelerate = importlib.util.find_spec("accelerate") is not None
    is_direct = device.type == "cuda" and has_accelerate
    result: Any = AutoModelForCausalLM.from_pretrained(
        source,
        config=config,
        dtype=dtype,
        output_loading_info=True,
        # Not to go on with them, but to name them below.
        ignore_mismatched_sizes=True,
        device_map={"": device} if is_direct and shard.num_ranks == 1 else None,
        **_distributed(shard, has_accelerate),
    )
    module: PreTrainedModel = result[0]
    # Transformers would go on with random weights for these.
    for what, keys in (
        ("are missing", result[1]["missing_keys"]),
        ("have other shapes than config.json says", result[1]["mismatched_keys"]),
    ):
        if keys:
            first = sorted(map(str, keys))[:3]
            raise InvalidInputError(
                "model", name, f"must have all weights; {len(keys)} {what}: {first}"
            )
    return module


def _distributed(shard: Shard, has_accelerate: bool) -> dict[str, Any]:
    """What makes transformers read the slices of its plan alone."""
    if shard.num_ranks == 1:
        return {}
    if not has_accelerate:
        raise InvalidInputError(
            "tensor_parallel_size", shard.num_ranks, "needs the package accelerate"
        )
    from transformers.distributed import DistributedConfig

    return {"distributed_config": DistributedConfig(tp_size=shard.num_ranks)}


def _tokenizer(source: str, name: str) -> Any | None:
    folder = Path(source)
    is_local = folder.is_dir()
    if is_local and not any((folder / file).exists() for file in _TOKENIZER_FILES):
        return None
    with as_input_error(name, "must have a tokenizer that can be read, or none"):
        try:
            # Without clean-up decoding is lossless, and text can be cut and joined anywhere.
            return AutoTokenizer.from_pretrained(source, clean_up_tokenization_spaces=False)
        except (OSError, ValueError):
            if is_local:
                raise
            return None  # how the hub says that there is none


def _described(module: PreTrainedModel, tokenizer: Any | None) -> LoadedModel:
    config = module.config
    text_config = config.get_text_config(decoder=True)
    generation_config = getattr(module, "generation_config", None)
    eos = getattr(generation_config, "eos_token_id", None)
    if eos is None:
        eos = getattr(text_config, "eos_token_id", None)
    ids = [] if eos is None else eos if isinstance(eos, (list, tuple)) else [eos]
    if not all(type(token_id) is int for token_id in ids):
        raise InvalidInputError("eos_token_id", eos, "must be a token id, or a list of them")
    head = module.get_output_embeddings()
    if head is None or not hasattr(text_config, "vocab_size"):
        raise UnsupportedModelError(f"{type(module).__name__} has no language-model head")
    limit = getattr(text_config, "max_position_embeddings", None)
    if limit is None:  # of the decoder of a model that also has an encoder
        limit = getattr(text_config, "max_target_positions", None)
    if not isinstance(limit, int) or limit < 1:
        raise UnsupportedModelError(
            f"{type(module).__name__}: its config gives no max_position_embeddings"
        )
    return LoadedModel(
        module,
        config,
        tokenizer,
        frozenset(ids),
        int(text_config.vocab_size),
        limit,
        model_type=config.model_type,
    )
