"""``import vllm`` in its tests: the modules of ``pagespec.compat.vllm``, and a mark for the rest.

A name that pagespec has is the same object. Any other name becomes a ``Missing``. Importing it is
allowed, because a test file imports more than each of its tests uses. Its use in a test ends that
test: as not applicable if the name is internal or belongs to a feature that pagespec refuses, as
failed if it is a public name.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest

from . import own_names

PEER = "vllm"
OURS = "pagespec.compat.vllm"

SERVER = "internal: classes of the server"
ENGINE = "internal: classes of the engine"
CONFIG = "internal: classes of the configuration"
KERNELS = "internal: layers and kernels"

# The longest prefix counts. "" is a public name: pagespec has to have it.
FEATURES: dict[str, str] = {
    "vllm": "internal: other",
    "vllm.LLM": "",
    "vllm.LLMEngine": "",
    "vllm.AsyncLLMEngine": "",
    "vllm.EngineArgs": "",
    "vllm.AsyncEngineArgs": "",
    "vllm.SamplingParams": "",
    "vllm.RequestOutput": "",
    "vllm.CompletionOutput": "",
    "vllm.TextPrompt": "",
    "vllm.TokensPrompt": "",
    "vllm.PromptType": "",
    "vllm.__version__": "",
    "vllm.PoolingParams": "embeddings",
    "vllm.assets": "images and audio",
    "vllm.distributed.cleanup_dist_env_and_memory": "",
    "vllm._custom_ops": KERNELS,
    "vllm.benchmarks": "internal: benchmarks",
    "vllm.config": CONFIG,
    "vllm.config.CompilationMode": "modes of torch.compile",
    "vllm.engine": "",
    "vllm.engine.protocol": ENGINE,
    "vllm.engine.protocol.StreamingInput": "streaming input",
    "vllm.entrypoints": SERVER,
    "vllm.entrypoints.llm": "",
    "vllm.entrypoints.mcp": "tool server (MCP)",
    "vllm.entrypoints.openai.parser.harmony_utils": "Harmony (gpt-oss)",
    "vllm.entrypoints.openai.responses.harmony": "Harmony (gpt-oss)",
    "vllm.entrypoints.openai.responses": "Responses API",
    "vllm.entrypoints.openai.run_batch": "batch files (run-batch)",
    "vllm.entrypoints.pooling": "embeddings",
    "vllm.entrypoints.serve.lora": "LoRA",
    "vllm.entrypoints.serve.sagemaker": "SageMaker",
    "vllm.exceptions": "",
    "vllm.inputs": "",
    "vllm.inputs.preprocess": ENGINE,
    "vllm.inputs.tokens_input": ENGINE,
    "vllm.logprobs": "",
    "vllm.lora": "LoRA",
    "vllm.multimodal": "images and audio",
    "vllm.config.multimodal": "images and audio",
    "vllm.model_executor": KERNELS,
    "vllm.outputs": "",
    "vllm.parser": SERVER,
    "vllm.reasoning": SERVER,
    "vllm.renderers": SERVER,
    "vllm.renderers.embed_utils": "prompt embeddings",
    "vllm.sampling_params": "",
    "vllm.sampling_params.BeamSearchParams": "beam search",
    "vllm.tokenizers": SERVER,
    "vllm.tokenizers.get_tokenizer": "",
    "vllm.tool_parsers": SERVER,
    "vllm.utils": "internal: utility functions",
    "vllm.v1": ENGINE,
    "vllm.v1.attention": KERNELS,
    "vllm.v1.engine.async_llm": "",
    "vllm.v1.engine.exceptions": "",
    "vllm.v1.engine.llm_engine": "",
    "vllm.v1.metrics.loggers": "stat loggers as classes",
    "vllm.v1.metrics.reader": "",
    "vllm.v1.sample": KERNELS,
    "vllm.v1.worker": KERNELS,
}

is_running_test = False
"""Whether a test or a fixture runs; while files are collected, a ``Missing`` may be used."""
current_test = ""
"""pytest's id of the test that runs."""


def feature_of(name: str) -> str:
    """What a dotted name of vLLM belongs to; "" if it is a public name of ours as well."""
    while name not in FEATURES:
        name = name.rpartition(".")[0]
        if not name:
            return "internal: other"
    return FEATURES[name]


def not_applicable(feature: str, name: str) -> None:
    """End the test as not applicable. ``pytest.raises(Exception)`` does not catch this."""
    pytest.skip(f"not applicable: {feature} ({name})")


class Missing:
    """A name of vLLM that pagespec does not have."""

    def __new__(cls, *_: object) -> Missing:
        # ``Missing("vllm.A").__new__(...)``: a test makes an instance without ``__init__``.
        return cls._used() if isinstance(cls, Missing) else super().__new__(cls)

    def __init__(self, name: str) -> None:
        self.__dict__["_peer_name"] = name

    def _used(self, name: str = "") -> Missing:
        own = self.__dict__["_peer_name"]
        if not is_running_test:
            return Missing(f"{own}.{name}" if name else own)
        feature = feature_of(own)
        if not feature:
            raise AttributeError(f"pagespec has no {own}")
        not_applicable(feature, own)
        raise AssertionError

    def __getattr__(self, name: str) -> Any:
        if name.startswith(("__", "_pytest")):
            raise AttributeError(name)
        return self._used(name)

    def __setattr__(self, name: str, value: object) -> None:
        self._used(name)

    def __call__(self, *_: object, **__: object) -> Any:
        return self._used()

    def __getitem__(self, _: object) -> Any:
        return self._used()

    def __or__(self, _: object) -> Any:
        return self

    __ror__ = __or__

    def __iter__(self) -> Iterator[Any]:
        self._used()
        return iter(())

    def __instancecheck__(self, _: object) -> bool:
        self._used()
        return False

    def __mro_entries__(self, _: object) -> tuple[type, ...]:
        return (object,)

    def __bool__(self) -> bool:
        return True

    def _operate(self, _: object) -> Any:
        return self._used()

    __add__ = __radd__ = __sub__ = __mul__ = __rmul__ = _operate
    __lt__ = __le__ = __gt__ = __ge__ = _operate

    def __repr__(self) -> str:
        return f"Missing({self.__dict__['_peer_name']})"


class StandInModule(ModuleType):
    """A module of vLLM: attributes of ours first, then those of ``own_names``, then ``Missing``."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and name != "__version__":
            raise AttributeError(name)
        ours = self.__dict__["_peer_ours"]
        if ours is not None:
            try:
                return getattr(ours, name)
            except (AttributeError, ImportError):
                pass
        dotted = f"{self.__name__}.{name}"
        if dotted in own_names.NAMES:
            return own_names.NAMES[dotted]
        return Missing(dotted)


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, name: str, _path: Any, _target: Any = None) -> Any:
        if name != PEER and not name.startswith(f"{PEER}."):
            return None
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        module = StandInModule(spec.name)
        module.__dict__["_peer_ours"] = module_of_ours(spec.name)
        return module

    def exec_module(self, module: ModuleType) -> None:
        module.__path__ = []


def module_of_ours(name: str) -> ModuleType | None:
    """The module of pagespec in place of one of vLLM; None if there is none."""
    # A module of ours may hold the name as an attribute and as a module; a class is no module.
    try:
        return importlib.import_module(OURS + name.removeprefix(PEER))
    except ImportError:
        return None


def install() -> None:
    """Let ``import vllm`` find the stand-in in this process."""
    sys.meta_path.insert(0, _Finder())
