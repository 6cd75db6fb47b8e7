"""Models in place of those of its tests.

A text-generation model with turns becomes SmolLM2-135M-Instruct. A base model becomes a random
Llama of two layers, which never ends a text and is ten times as fast.
"""

from __future__ import annotations

import functools
import os
import re
from typing import Any

from . import files, own_names, run, sources, stand_in

MAX_MODEL_LEN = 8192  # of SmolLM2
# Names of models that are for a feature that pagespec refuses.
_OF_FEATURES = {
    r"VL-|llava|SmolVLM|chameleon|gemma-3n|Audio|whisper|ultravox|gemma-4|translategemma": (
        "images and audio"
    ),
    r"e5-|Embedding|bge-|MiniLM|jina": "embeddings",
    r"[Ll]o[Rr][Aa]": "LoRA",
    r"gpt-oss": "Harmony (gpt-oss)",
    r"NVFP4|nvfp4": "NVFP4 weights",
}
# Models without turns. Their tests compare no texts with a literal.
_BASE = (
    r"tiny-random-Llama|opt-125m|gpt2|llama-160m|Llama-3\.2-1B$|[Ll]lama-2-7b-hf$|Mistral-7B-v0\.1$"
)
_KINDS = {
    "tiny": sources.tiny_folder,
    "instruct": sources.model_folder,
}
# What a test gives because of its own model, and what chooses kernels and steps of vLLM: no answer
# of pagespec depends on these.
_OF_ITS_MODEL = ("revision", "tokenizer_revision", "trust_remote_code")
_OF_ITS_STEPS = (
    "attention_backend",
    "attention_config",
    "disable_hybrid_kv_cache_manager",
    "enable_chunked_prefill",
)


def feature_of(name: str) -> str:
    """The refused feature that a model is for, or ""."""
    return next((what for each, what in _OF_FEATURES.items() if re.search(each, name)), "")


def model_of(name: str) -> str:
    """The folder in place of a model's name; a path remains. Ends a test of another modality."""
    if os.path.exists(name):
        return name
    feature = feature_of(name)
    if stand_in.current_test.startswith(files.ANY_MODEL):
        feature = ""
    if feature and stand_in.is_running_test:
        stand_in.not_applicable(feature, name)
    return str(_KINDS[kind_of(name)](sources.cache_folder()))


def kind_of(name: str) -> str:
    """Which model stands for a text-generation model: a key of ``_KINDS``."""
    test = stand_in.current_test
    is_tiny = test.startswith(files.TINY) or re.search(_BASE, name)
    if test.startswith(files.READ):
        is_tiny = False
    return "tiny" if is_tiny else "instruct"


def engine_arguments(arguments: dict[str, Any]) -> dict[str, Any]:
    """Arguments of ``LLM`` with the model replaced, and float32, which a CPU computes fastest."""
    replaced = dict(arguments)
    for name in ("model", "tokenizer"):
        if isinstance(replaced.get(name), str):
            replaced[name] = model_of(replaced[name])
    if replaced.get("dtype") not in (None, "auto"):
        replaced["dtype"] = "float32"
    if isinstance(replaced.get("max_model_len"), int):
        replaced["max_model_len"] = min(replaced["max_model_len"], MAX_MODEL_LEN)
    for name in _OF_ITS_MODEL:
        replaced.pop(name, None)
    for name in _OF_ITS_STEPS:
        if replaced.pop(name, None) is not None:
            run.note_left_out(name)
    draft = replaced.get("speculative_config")
    # "ngram" and "[ngram]" are no models.
    if isinstance(draft, dict) and "/" in str(draft.get("model")):
        replaced["speculative_config"] = draft | {"model": model_of(draft["model"])}
    return replaced


def replace_models() -> None:
    """Replace models wherever this process loads one: ``LLM`` and transformers."""
    import huggingface_hub
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    import pagespec

    # Adapters and data sets: no such path exists.
    huggingface_hub.snapshot_download = lambda repo_id, **_: f"/not-downloaded/{repo_id}"
    if not torch.accelerator.is_available():  # tests free its memory between two engines
        torch.accelerator.empty_cache = torch.accelerator.synchronize = lambda *_: None
    _replace_of_llm(pagespec.LLM)
    pagespec.AsyncLLM.output_processor = property(own_names.OutputProcessor)
    for auto in (AutoConfig, AutoModelForCausalLM, AutoTokenizer):
        _replace_of_auto(auto)


def _replace_of_llm(llm: Any) -> None:
    init = llm.__init__

    @functools.wraps(init)
    def start(self: Any, *positional: Any, **arguments: Any) -> None:
        if positional:
            arguments = {"model": positional[0]} | arguments
        init(self, *positional[1:], **engine_arguments(arguments))

    llm.__init__ = start


def _replace_of_auto(auto: Any) -> None:
    load = auto.from_pretrained.__func__

    @functools.wraps(load)
    def from_pretrained(cls: Any, name: Any, *rest: Any, **arguments: Any) -> Any:
        if isinstance(name, str):
            name = model_of(name)
            arguments.pop("revision", None)
        return load(cls, name, *rest, **arguments)

    auto.from_pretrained = classmethod(from_pretrained)
