"""Every text-generation model of its tests becomes SmolLM2-135M-Instruct."""

from __future__ import annotations

import functools
import os
import re
from typing import Any

from . import sources, stand_in

MAX_MODEL_LEN = 8192  # of SmolLM2
# Names of models that are for a feature that pagespec refuses.
_OF_FEATURES = {
    r"VL-|llava|SmolVLM|chameleon|gemma-3n|Audio|whisper|ultravox|gemma-4|translategemma": (
        "images and audio"
    ),
    r"e5-|Embedding|bge-|MiniLM|jina": "embeddings",
    r"[Ll]o[Rr][Aa]": "LoRA",
    r"gpt-oss": "Harmony (gpt-oss)",
}


def feature_of(name: str) -> str:
    """The refused feature that a model is for, or ""."""
    return next((what for each, what in _OF_FEATURES.items() if re.search(each, name)), "")


def model_of(name: str) -> str:
    """The folder in place of a model's name; a path remains. Ends a test of another modality."""
    if os.path.exists(name):
        return name
    feature = feature_of(name)
    if feature and stand_in.is_running_test:
        stand_in.not_applicable(feature, name)
    return str(sources.model_folder(sources.cache_folder()))


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
    draft = replaced.get("speculative_config")
    # "ngram" and "[ngram]" are no models.
    if isinstance(draft, dict) and "/" in str(draft.get("model")):
        replaced["speculative_config"] = draft | {"model": model_of(draft["model"])}
    return replaced


def replace_models() -> None:
    """Replace models wherever this process loads one: ``LLM`` and transformers."""
    import huggingface_hub
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    import pagespec

    # Adapters and data sets: no such path exists.
    huggingface_hub.snapshot_download = lambda repo_id, **_: f"/not-downloaded/{repo_id}"
    _replace_of_llm(pagespec.LLM)
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
