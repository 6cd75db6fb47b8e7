"""Why a test of vLLM that does not pass is expected not to.

A skipped test names its feature itself. A failed one is looked up in ``RULES``; without a rule it
counts as failing because of pagespec.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from . import examples
from .expected import DIFFERS, FAILS, NOT_APPLICABLE, PASSED, WHOLE_FILE, Result


@dataclass(frozen=True)
class Rule:
    """Tests that fail for a known reason.

    Attributes:
        test: pattern that the test's id contains.
        message: pattern that the error contains.
    """

    outcome: str
    reason: str
    test: str = ""
    message: str = ""

    def fits(self, entry: Mapping[str, Any]) -> bool:
        return bool(re.search(self.test, entry["id"]) and re.search(self.message, entry["reason"]))


def _no(feature: str, test: str = "", message: str = "") -> Rule:
    return Rule(NOT_APPLICABLE, feature, test, message)


def _differs(reason: str, test: str = "", message: str = "") -> Rule:
    return Rule(DIFFERS, reason, test, message)


ANOTHER_MODEL = "another model"

# Packages that only tests of a refused feature, or of internals, need.
_PACKAGES = {
    "aiohttp": "internal",
    "datasets": "data sets of the hub",
    "flashinfer": "internal",
    "lm_eval": "data sets of the hub",
    "model_hosting_container_standards": "SageMaker",
    "openai_harmony": "Harmony (gpt-oss)",
    "prometheus_fastapi_instrumentator": "internal",
    "schemathesis": "requests made by schemathesis",
}

# Tests with literal numbers of tokens, token ids or texts of their model.
_OF_ANOTHER_MODEL = (
    r"openai/completion/test_completion\.py::test_single_completion",
    r"openai/completion/test_completion\.py::test_completion_streaming",
    r"chat_completion/test_chat\.py::test_single_chat_session",
    r"chat_completion/test_chat\.py::test_more_than_one_prompt_logprobs_chat",
    r"chat_completion/test_chat\.py::test_complex_message_content",
    r"chat_completion/test_chat\.py::test_response_format_json_object",
    r"chat_completion/test_chat\.py::test_response_format_json_schema",
    r"v1/sample/test_sampling_params_e2e\.py::test_stop",
    r"entrypoints/llm/test_chat\.py::test_chat_extra_kwargs",
    r"samplers/test_no_bad_words\.py::TestOneTokenBadWord::test_one_token_bad_word",
    r"samplers/test_no_bad_words\.py::TestTwoTokenBadWord::test_two_token_bad_word",
    r"detokenizer/test_disable_detokenization\.py::test_computed_prefix_blocks",
    r"openai/test_return_token_ids\.py::test_comparison_with_prompt_logprobs_and_logprobs",
    r"serve/tokenize/test_tokenization\.py::test_tokenize_chat_with_tools",
    r"detokenizer/test_stop_strings\.py::test_stop_strings",
)

RULES: tuple[Rule, ...] = (
    *(_no(feature, name, words) for name, (feature, words) in examples.REFUSED.items()),
    *(_no(feature, message=f"No module named '{name}") for name, feature in _PACKAGES.items()),
    _no("internal", message="Torch not compiled with CUDA|ATen_cuda|simple_compile_backend"),
    _no("internal", message=r"X is not a type object \(Missing\)"),
    _no("draft heads (EAGLE, Medusa)", message="eagle is not supported|medusa is not supported"),
    _no("tokenizers of mistral_common", message="tokenizer_mode = 'mistral'"),
    _differs("the version is that of pagespec", test=r"::test_show_version"),
    _no("internal", message="no attribute 'output_processor'"),
    _no("internal", test=r"test_(cutlass|rms_norm)_batch_invarian"),
    _no("draft heads (EAGLE, Medusa)", test="test_laguna_dflash"),
    _no("NVFP4 weights", test="nvfp4"),
    _no("LoRA", test=r"models/test_models\.py::test_check_models"),
    _no("internal", message="Cannot locate module vllm"),
    _no("diffusion models", test=r"test_sampling_params\.py::test_(non_)?diffusion"),
    _no("Responses API", test="entrypoints/openai/responses/"),
    _no("batch files (run-batch)", test=r"test_run_batch\.py"),
    _no("LoRA", message=r"LoRA|enable_lora|zephyr-lora"),
    _no("LoRA", test="zephyr-lora"),
    _no("beam search", message="beam search"),
    _no("beam search", test="beam_search"),
    _no("beam search", message="use_beam_search"),
    _no("embeddings", message="embeddings are not supported"),
    _differs(
        "OpenAI: the chunk with the finish reason has no content",
        test=r"test_chat\.py::test_chat_streaming",
    ),
    _differs(
        "OpenAI: a role that it does not have is refused",
        test=r"test_chat\.py::test_custom_role",
    ),
    _differs("the text of the error", test=r"test_chat\.py::test_long_seed"),
    _differs(
        "OpenAI: logprobs is a boolean, top_logprobs is 0 to 20",
        test=r"test_chat_echo\.py::test_top_logprobs",
    ),
    _differs(ANOTHER_MODEL, message="chat template does not show tools"),
    _no("LoRA", test="serve/lora/"),
    _no("SageMaker", message="/invocations"),
    _no("SageMaker", test="serve/sagemaker/"),
    _differs("the text of the error", message="Regex pattern did not match"),
    *(_differs(ANOTHER_MODEL, test=rf"{name}(\[|$)") for name in _OF_ANOTHER_MODEL),
)


def result_of(entry: Mapping[str, Any]) -> Result:
    """The result of an entry of a record."""
    file, _, test = entry["id"].partition("::")
    test = test or WHOLE_FILE
    text, seconds = entry["reason"], entry["seconds"]
    if entry["outcome"] == "passed":
        return Result(file, test, PASSED, "", seconds)
    if entry["outcome"] == "skipped":
        stated = re.fullmatch(r"not applicable: (.*) \([^()]*\)", text)
        reason = stated[1] if stated else "skipped by the test"
        return Result(file, test, NOT_APPLICABLE, reason, seconds)
    for rule in RULES:
        if rule.fits(entry):
            return Result(file, test, rule.outcome, rule.reason, seconds)
    return Result(file, test, FAILS, text, seconds)
