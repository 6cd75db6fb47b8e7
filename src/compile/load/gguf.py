"""GGUF files: converted once into a safetensors folder, which then loads like any other folder."""

from __future__ import annotations

import hashlib
import json
import logging
import os
from collections.abc import Callable
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import transformers
import xxhash

from ...disk_cache import cache_root, work_folder
from ...errors import InvalidInputError, UnsupportedModelError
from .checkpoint import as_input_error, cause
from .gguf_check import check_read_whole

logger = logging.getLogger("pagespec")

_MAGIC = b"GGUF"
_UNSUPPORTED = ("is not supported", "Unrecognized configuration class")  # transformers' words
_HASH_CHUNK_BYTES = 1 << 22
_MANIFEST = "manifest.json"  # of a conversion
# Part of the cache key: raise it when the conversion below changes.
_CONVERSION_VERSION = 3


def converted_folder(
    path: Path,
    cache_dir: str | os.PathLike[str] | None = None,
    check: Callable[[Path], None] | None = None,
) -> Path:
    """The folder with config, float32 safetensors and tokenizer, converted from a GGUF file.

    The tokenizer, its chat templates and the tokens that end an answer come from the file itself
    (:mod:`.gguf_tokenizer`), not from transformers' conversion.

    The conversion runs at first use, and again if the folder was damaged since. The key covers file
    name, size, content and transformers' version. The folder appears by one rename, so a reader
    never sees a partial folder and two writers do no harm.

    Args:
        check: called before a conversion; it may refuse the file.

    Raises:
        InvalidInputError: the ``gguf`` package is missing, or the file is not readable as GGUF.
        UnsupportedModelError: transformers cannot convert the file, or would leave out tensors or
            settings of it; or its tokenizer is of an unknown kind.
    """
    path = path.resolve()
    with path.open("rb") as file:
        content: Any = hashlib.file_digest(file, xxhash.xxh3_128)  # type: ignore[arg-type]
    key = (
        f"{path.stem}-{path.stat().st_size}-{content.hexdigest()}"
        f"-transformers{transformers.__version__}-v{_CONVERSION_VERSION}"
    )
    target = cache_root(cache_dir) / "gguf" / key
    if _is_whole(target):
        return target
    if find_spec("gguf") is None:
        raise InvalidInputError(
            "model", str(path), "reading a GGUF file needs the gguf package: pip install gguf"
        )
    if check is not None:
        with as_input_error(str(path), "must be a GGUF file that can be read"):
            check(path)
    logger.info("converting %s, only once: %s keeps the result ...", path.name, target.parent)
    with work_folder(target.parent, ".converting-") as work:
        made = work / "made"
        made.mkdir()
        _convert(path, made)
        (made / _MANIFEST).write_text(json.dumps(_manifest(made)))
        if not _is_whole(target):  # or another process finished first, with the same result
            with suppress(FileNotFoundError):
                target.rename(work / "damaged")
            try:
                made.rename(target)
            except OSError:
                if not _is_whole(target):
                    raise
    return target


def _manifest(folder: Path) -> dict[str, list[int | str]]:
    """Size and digest of each file. Only the start and the end of a large file are read, because
    reading all of it takes as long as loading it. They reveal what a full disk or a crash
    leaves."""
    found: dict[str, list[int | str]] = {}
    for path in sorted(folder.rglob("*")):  # named chat templates have their own folder
        if path.name == _MANIFEST or path.is_dir():
            continue
        size = path.stat().st_size
        with path.open("rb") as file:
            digest = xxhash.xxh3_128(file.read(_HASH_CHUNK_BYTES))
            file.seek(max(0, size - _HASH_CHUNK_BYTES))
            digest.update(file.read())
        found[path.relative_to(folder).as_posix()] = [size, digest.hexdigest()]
    return found


def _is_whole(folder: Path) -> bool:
    """Whether the folder is complete and as it was written."""
    try:
        noted = json.loads((folder / _MANIFEST).read_bytes())
        return bool(noted == _manifest(folder))
    except (OSError, ValueError):
        return False


def _convert(path: Path, folder: Path) -> None:
    # These imports take seconds, and an already converted file does not need them.
    from transformers import AutoConfig, AutoModelForCausalLM

    from .gguf_tokenizer import build_tokenizer
    from .gguf_vocabulary import quick_gguf, read_vocabulary

    with path.open("rb") as file:
        if file.read(len(_MAGIC)) != _MAGIC:
            raise InvalidInputError("model", str(path), "must be a GGUF file")
    # The folder may contain a tokenizer's code next to the file.
    options: dict[str, Any] = {"gguf_file": path.name, "trust_remote_code": False}
    with as_input_error(str(path), "must be a GGUF file that can be read"), quick_gguf():
        vocabulary = read_vocabulary(path)
        tokenizer = None if vocabulary is None else build_tokenizer(vocabulary)
        try:
            config = AutoConfig.from_pretrained(path.parent, **options)
            module: Any = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        except ValueError as error:
            # A truncated file also raises ValueError: tensors reach beyond its end.
            if any(words in str(error) for words in _UNSUPPORTED):
                raise UnsupportedModelError(f"{path.name}: {cause(error)}") from error
            raise
        _read_weights(path, config, module)
    if vocabulary is not None:
        settings = module.generation_config
        settings.eos_token_id = sorted(vocabulary.end_ids) or None
        settings.suppress_tokens = vocabulary.suppressed or None
    module.save_pretrained(folder)
    if tokenizer is not None:
        tokenizer.save_pretrained(folder)


def _read_weights(path: Path, config: Any, module: Any) -> None:
    # from_pretrained(gguf_file=...) requires accelerate; the functions that it calls do not.
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    try:
        check_read_whole(path, config, module)
        tensors = load_gguf_checkpoint(
            str(path), return_tensors=True, model_to_load=module, torch_dtype=torch.float32
        )["tensors"]
    except NotImplementedError as error:
        raise UnsupportedModelError(f"{path.name}: {cause(error)}") from error
    missing, unexpected = module.load_state_dict(tensors, strict=False)
    module.tie_weights()
    tied = set(module.all_tied_weights_keys)
    absent = [key for key in missing if key not in tied]
    if absent or unexpected:
        raise UnsupportedModelError(
            f"{path.name}: conversion left weights unused or missing: {(absent + unexpected)[:3]}"
        )
