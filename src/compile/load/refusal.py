"""Turns any exception that transformers raises on a damaged model folder into InvalidInputError."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from ...errors import InvalidInputError, PagespecError, shortened

# Not the files' fault: a device without memory, or in trouble.
_PASSED_ON = (PagespecError, MemoryError, torch.OutOfMemoryError, torch.AcceleratorError)
_NO_MEMORY_ON_CPU = "can't allocate memory"  # torch raises a plain RuntimeError there
_MAX_CAUSE = 200  # characters


@contextmanager
def as_input_error(model: str, limit: str) -> Iterator[None]:
    """Turn what goes wrong inside into a refusal of ``model`` that names the cause.

    Parsers of configs, weights and tokenizers raise what they like over a damaged file: KeyError,
    struct.error, ZeroDivisionError and their own.

    Raises:
        InvalidInputError: ``limit`` says what the model's files must be.
    """
    try:
        yield
    except _PASSED_ON:
        raise
    except Exception as error:
        if _NO_MEMORY_ON_CPU in str(error):
            raise
        raise InvalidInputError("model", model, f"{limit} ({cause(error)})") from error


def cause(error: Exception) -> str:
    """An error in one line."""
    return shortened(f"{type(error).__name__}: {' '.join(str(error).split())}", _MAX_CAUSE)
