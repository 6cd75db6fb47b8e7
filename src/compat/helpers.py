"""Functions that vLLM's scripts import besides its classes."""

from __future__ import annotations

import logging
import uuid
from typing import Any

from ..errors import UnknownArgumentError
from ..params.foreign import ENGINE, refuse

_OF_TOKENIZERS = ("tokenizer_mode", "trust_remote_code", "revision", "download_dir")


def get_tokenizer(tokenizer_name: Any, **others: Any) -> Any:
    """The tokenizer of a folder, a hub id or a .gguf file, as ``LLM.tokenizer``.

    Args:
        others: vLLM's arguments, with the values that engine arguments of the name may have.

    Raises:
        InvalidInputError: there is no such tokenizer, or an argument has an effect.
        UnknownArgumentError: there is no such argument.
    """
    for name, value in others.items():
        if name not in _OF_TOKENIZERS:
            raise UnknownArgumentError(name, value, _OF_TOKENIZERS)
        refuse(name, value, ENGINE)
    from ..compile.load.load import load_tokenizer

    return load_tokenizer(tokenizer_name)


def random_uuid() -> str:
    """32 random hexadecimal digits."""
    return uuid.uuid4().hex


def init_logger(name: str) -> logging.Logger:
    """The logger of this name, of the standard library."""
    return logging.getLogger(name)
