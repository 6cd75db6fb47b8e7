"""pagespec: text generation with traced Hugging Face models and a specified scheduler.

Public names are resolved on first use, so that the scheduler, the block manager and the command
line's ``--help`` can be imported without loading torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0.dev0"

_HOME = {
    "LLM": "pagespec.llm",
    "AsyncLLM": "pagespec.aio.async_llm",
    "SamplingParams": "pagespec.engine.sampling_params",
    "StructuredOutputs": "pagespec.engine.structured_outputs",
    "StructuredOutputsParams": "pagespec.engine.structured_outputs",
    "RequestOutput": "pagespec.engine.outputs",
    "CompletionOutput": "pagespec.engine.outputs",
    "RequestMetrics": "pagespec.engine.outputs",
    "Logprob": "pagespec.engine.outputs",
    "ScoreOutput": "pagespec.engine.outputs",
    "PagespecError": "pagespec.errors",
    "InvalidInputError": "pagespec.errors",
    "UnsupportedModelError": "pagespec.errors",
    "EngineError": "pagespec.errors",
    "RequestError": "pagespec.errors",
    "EngineBusyError": "pagespec.errors",
    "EngineStoppedError": "pagespec.errors",
    "embedded_model_path": "pagespec.compile.load.embedded",
}

__all__ = ["__version__", *_HOME]

if TYPE_CHECKING:
    from .aio.async_llm import AsyncLLM
    from .compile.load.embedded import embedded_model_path
    from .engine.outputs import (
        CompletionOutput,
        Logprob,
        RequestMetrics,
        RequestOutput,
        ScoreOutput,
    )
    from .engine.sampling_params import SamplingParams
    from .engine.structured_outputs import StructuredOutputs, StructuredOutputsParams
    from .errors import (
        EngineBusyError,
        EngineError,
        EngineStoppedError,
        InvalidInputError,
        PagespecError,
        RequestError,
        UnsupportedModelError,
    )
    from .llm import LLM


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(importlib.import_module(_HOME[name]), name)
    raise AttributeError(f"module 'pagespec' has no attribute {name!r}")
