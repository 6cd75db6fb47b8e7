"""vLLM's module paths: found under three names, with our classes."""

from __future__ import annotations

import importlib
import subprocess
import sys
from pathlib import Path

import pytest

import pagespec
from pagespec import InvalidInputError
from pagespec.compat.refused import REFUSED, REFUSED_MODULES
from pagespec.params.foreign import translate

FOLDER = Path(pagespec.__file__).parent / "compat" / "vllm"


def module_names() -> list[str]:
    """The modules of the folder, without their common prefix."""
    paths = (path.relative_to(FOLDER).with_suffix("") for path in FOLDER.rglob("*.py"))
    names = {".".join(path.parts).removesuffix("__init__").rstrip(".") for path in paths}
    return sorted(names - {""} - REFUSED_MODULES.keys())


@pytest.mark.parametrize("name", module_names())
def test_a_module_has_the_same_classes_under_both_names(name: str) -> None:
    whole = importlib.import_module(f"pagespec.compat.vllm.{name}")
    short = importlib.import_module(f"pagespec.{name}")
    for one in getattr(whole, "__all__", ()):
        assert getattr(whole, one) is getattr(short, one)


@pytest.mark.parametrize(
    ("module", "names"),
    [
        (
            "",
            "LLM LLMEngine EngineArgs AsyncEngineArgs AsyncLLMEngine SamplingParams RequestOutput",
        ),
        ("", "CompletionOutput TextPrompt TokensPrompt PromptType"),
        ("", "__version__ __version_tuple__"),
        ("sampling_params", "RequestOutputKind SamplingParams StructuredOutputsParams"),
        ("outputs", "RequestOutput CompletionOutput"),
        ("inputs", "TextPrompt TokensPrompt PromptType"),
        ("logprobs", "Logprob"),
        ("lora.request", "LoRARequest"),
        ("engine.arg_utils", "EngineArgs AsyncEngineArgs"),
        ("engine.async_llm_engine", "AsyncLLMEngine"),
        ("engine.llm_engine", "LLMEngine"),
        ("v1.engine.llm_engine", "LLMEngine"),
        ("v1.metrics.reader", "Counter Gauge Histogram Metric Vector"),
        ("v1.engine.async_llm", "AsyncLLM"),
        ("config", "AttentionConfig CompilationConfig KVTransferConfig PoolerConfig"),
        ("config", "ProfilerConfig StructuredOutputsConfig"),
        ("entrypoints.llm", "LLM"),
        ("distributed", "cleanup_dist_env_and_memory"),
        ("utils", "FlexibleArgumentParser random_uuid"),
        ("utils.argparse_utils", "FlexibleArgumentParser"),
        ("tokenizers", "get_tokenizer"),
        ("transformers_utils.tokenizer", "get_tokenizer"),
        ("exceptions", "VLLMValidationError"),
        ("v1.engine.exceptions", "EngineDeadError EngineGenerateError"),
        ("config", "VllmConfig"),
        ("v1.sample.logits_processor", "AdapterLogitsProcessor BatchUpdate LogitsProcessor"),
        ("v1.sample.logits_processor.builtin", "process_dict_updates"),
        ("logger", "init_logger"),
        ("benchmarks.datasets", "SampleRequest add_dataset_parser get_samples"),
    ],
)
def test_names_of_vllm_can_be_imported(module: str, names: str) -> None:
    found = importlib.import_module(f"pagespec.{module}".rstrip("."))
    of_vllm = importlib.import_module(f"pagespec.compat.vllm.{module}".rstrip("."))
    for name in names.split():
        assert getattr(found, name) is getattr(of_vllm, name)
        home = getattr(pagespec, name, None)
        assert home is None or home is getattr(found, name) or module


@pytest.mark.parametrize("name", sorted(REFUSED))
@pytest.mark.parametrize("module", ["pagespec", "pagespec.outputs", "pagespec.compat.vllm"])
def test_a_refused_name_is_an_import_error_with_the_reason(module: str, name: str) -> None:
    with pytest.raises(ImportError, match=name) as caught:
        exec(f"from {module} import {name}")
    assert REFUSED[name] in str(caught.value)


@pytest.mark.parametrize("name", ["assets.image", "multimodal.utils", "multimodal"])
@pytest.mark.parametrize("package", ["pagespec", "pagespec.compat.vllm"])
def test_a_refused_module_is_an_import_error_with_the_reason(package: str, name: str) -> None:
    with pytest.raises(ImportError, match="images, audio and video are not supported"):
        importlib.import_module(f"{package}.{name}")


@pytest.mark.parametrize("module", ["pagespec", "pagespec.outputs", "pagespec.sampling_params"])
def test_an_unknown_name_is_an_attribute_error(module: str) -> None:
    with pytest.raises(AttributeError, match="nonsense"):
        importlib.import_module(module).nonsense  # noqa: B018


def test_an_adapter_is_refused_where_it_is_made() -> None:
    from pagespec.compat.refused import LoRARequest

    with pytest.raises(InvalidInputError, match="merge the adapter"):
        LoRARequest("name", 1, "/folder")


def test_a_configuration_as_an_object_is_like_its_dict() -> None:
    from pagespec.config import CompilationConfig

    assert translate("compilation_config", CompilationConfig(), {}) == {}
    given = CompilationConfig(mode=3)
    assert given.mode == 3
    with pytest.raises(InvalidInputError, match=r"^compilation_config = {'mode': 3}:"):
        translate("compilation_config", given, {})
    with pytest.raises(AttributeError, match="level"):
        given.level  # noqa: B018


def test_imports_load_no_torch() -> None:
    modules = [name for name in module_names() if name != "compat"]
    code = (
        "import importlib, sys\n"
        "import pagespec\n"
        "assert not any(name.startswith('pagespec.') for name in sys.modules), 'not lazy'\n"
        f"for name in {modules!r}: importlib.import_module('pagespec.' + name)\n"
        "assert 'torch' not in sys.modules and 'transformers' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_the_tokenizer_of_a_name_that_is_no_model_is_refused() -> None:
    from pagespec.tokenizers import get_tokenizer

    with pytest.raises(InvalidInputError, match="existing"):
        get_tokenizer("/no/such/folder", trust_remote_code=False, revision=None)
    with pytest.raises(InvalidInputError, match=r"^revision = 'main'"):
        get_tokenizer("/no/such/folder", revision="main")
    with pytest.raises(InvalidInputError, match=r"^padding_side = .*no such argument"):
        get_tokenizer("/no/such/folder", padding_side="left")
