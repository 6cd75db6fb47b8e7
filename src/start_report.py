"""What a start logs of the model it built: caches, quantised weights, matmuls of a library."""

from __future__ import annotations

import logging

from .compile.captured_model import CapturedModel
from .engine.config import EngineConfig
from .engine.stats import EngineStats

logger = logging.getLogger("pagespec")


def report_capture(stats: EngineStats, captured: CapturedModel, quantization: str | None) -> None:
    """Note in the statistics, and log, what a captured model is.

    Args:
        quantization: the engine's setting.
    """
    stats.startup_s["compile"] = captured.compile_s
    stats.startup_s["capture"] -= captured.compile_s
    stats.num_captures = captured.num_captures
    stats.num_compilations = captured.num_compiled
    if captured.weight_formats:
        stats.quantization = captured.loaded.quantization or quantization
        stats.weight_formats = captured.weight_formats
        stats.float32_matrices = captured.float32_matrices
        logger.info("quantization: %s", _quantization_text(captured, stats.quantization))
    if captured.library_matmuls:
        stats.library_matmuls = captured.library_matmuls
        architecture = captured.loaded.architecture
        logger.warning("%s", _library_text(architecture, captured.library_matmuls))


def cache_text(config: EngineConfig, captured: CapturedModel) -> str:
    """What the KV cache holds, where it is not keys and values as they are."""
    num_latent = sum(spec.is_latent for spec in captured.specs)
    latent = f", latent vectors for {num_latent} of {len(captured.specs)} attention calls"
    fp8 = " in fp8" if config.kv_cache_dtype == "fp8" else ""
    return (latent if num_latent else "") + fp8


def _library_text(architecture: str, matmuls: dict[str, int]) -> str:
    """Which matmuls are not transparent by construction."""
    counts = ", ".join(f"{count} {name}" for name, count in matmuls.items())
    return (
        f"{architecture}: {counts} left to cuBLAS, whose order of summation may follow the number "
        "of rows: bits may follow the schedule (docs/transparency.md; pagespec verify tells)"
    )


def _quantization_text(captured: CapturedModel, scheme: str | None) -> str:
    """What is held in which format, and which matrices are not quantised."""
    formats = captured.weight_formats
    counts = ", ".join(f"{count / 1e6:.1f}M in {name}" for name, count in formats.items())
    left = ", ".join(captured.float32_matrices) or "vectors only"
    return f"{scheme}: {counts}; not quantised are {left}"
