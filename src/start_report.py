"""What a start logs of the model it built: caches, quantised weights, matmuls of a library."""

from __future__ import annotations

from .compile.captured_model import CapturedModel
from .engine.config import EngineConfig


def cache_text(config: EngineConfig, captured: CapturedModel) -> str:
    """What the KV cache holds, where it is not keys and values as they are."""
    num_latent = sum(spec.is_latent for spec in captured.specs)
    latent = f", latent vectors for {num_latent} of {len(captured.specs)} attention calls"
    fp8 = " in fp8" if config.kv_cache_dtype == "fp8" else ""
    return (latent if num_latent else "") + fp8


def library_text(architecture: str, matmuls: dict[str, int]) -> str:
    """Which matmuls are not transparent by construction."""
    counts = ", ".join(f"{count} {name}" for name, count in matmuls.items())
    return (
        f"{architecture}: {counts} left to cuBLAS, whose order of summation may follow the number "
        "of rows: bits may follow the schedule (docs/transparency.md; pagespec verify tells)"
    )


def quantization_text(captured: CapturedModel, scheme: str | None) -> str:
    """What is held in which format, and which matrices are not quantised."""
    formats = captured.weight_formats
    counts = ", ".join(f"{count / 1e6:.1f}M in {name}" for name, count in formats.items())
    left = ", ".join(captured.float32_matrices) or "vectors only"
    return f"{scheme}: {counts}; not quantised are {left}"
