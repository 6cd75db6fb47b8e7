"""Turns any exception that transformers raises on a damaged model folder into InvalidInputError."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from ...errors import InvalidInputError, PagespecError, UnsupportedModelError, shortened

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


def asks_to_run_code(error: Exception) -> bool:
    """Whether transformers would go on with ``trust_remote_code``."""
    return "trust_remote_code" in str(error)


def code_not_run(model: str, what: str) -> UnsupportedModelError:
    """The refusal of a model whose files name code of their own for its ``what``."""
    return UnsupportedModelError(
        f"{model}: its {what} needs Python code that comes with the model (auto_map). Such code "
        "is not run: trust_remote_code is not supported"
    )


def cause(error: Exception) -> str:
    """An error in one line."""
    return shortened(f"{type(error).__name__}: {' '.join(str(error).split())}", _MAX_CAUSE)
