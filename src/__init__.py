"""pagespec: text generation with traced Hugging Face models and a specified scheduler.

Public names are resolved on first use, so that the scheduler, the block manager and the command
line's ``--help`` can be imported without loading torch.
"""

from __future__ import annotations

import importlib
import os
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"
__version_tuple__ = tuple(int(part) for part in __version__.split("."))
# vLLM's modules under our name: `from pagespec.sampling_params import SamplingParams`.
__path__.append(os.path.join(os.path.dirname(__file__), "compat", "vllm"))

_MODULES = {
    "llm": "LLM LLMEngine",
    "serving.async_llm": "AsyncLLM",
    "engine.sampling_params": "SamplingParams",
    "engine.structured_outputs": "StructuredOutputs StructuredOutputsParams",
    "engine.logprob_lists": "Logprob",
    "engine.outputs": "RequestOutput CompletionOutput RequestMetrics ScoreOutput",
    "errors": "PagespecError InvalidInputError UnsupportedModelError EngineError RequestError "
    "EngineBusyError EngineStoppedError",
    "model_name": "embedded_model_path",
    "compat.arguments": "EngineArgs AsyncEngineArgs",
    "compat.vllm.engine.async_llm_engine": "AsyncLLMEngine",
    "compat.prompts": "TextPrompt TokensPrompt PromptType",
}
_HOME = {name: module for module, names in _MODULES.items() for name in names.split()}

__all__ = ["__version__", *_HOME]

if TYPE_CHECKING:
    from .compat.arguments import AsyncEngineArgs, EngineArgs
    from .compat.prompts import PromptType, TextPrompt, TokensPrompt
    from .compat.vllm.engine.async_llm_engine import AsyncLLMEngine
    from .engine.logprob_lists import Logprob
    from .engine.outputs import (
        CompletionOutput,
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
    from .llm import LLM, LLMEngine
    from .model_name import embedded_model_path
    from .serving.async_llm import AsyncLLM


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)
    from .compat.refused import attribute

    return attribute(__name__, name)
