"""Why a test of vLLM that does not pass is expected not to.

A skipped test states its reason itself: a missing feature, if :mod:`.stand_in` skipped it, else a
condition of its authors, and it counts as not run. A failed one is looked up in ``RULES``; without
a rule it counts as failing because of pagespec.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from . import examples, stand_in
from .expected import DIFFERS, FAILS, NOT_APPLICABLE, NOT_RUN, PASSED, WHOLE_FILE, Result


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


def _no(feature: str, message: str, test: str = "") -> Rule:
    return Rule(NOT_APPLICABLE, feature, test, message)


def _not_run(reason: str, message: str, test: str = "") -> Rule:
    return Rule(NOT_RUN, reason, test, message)


def _differs(reason: str, test: str, message: str = "") -> Rule:
    return Rule(DIFFERS, reason, test, message)


# Packages that `nox -s peer_tests` does not install.
_PACKAGES = {
    "aiohttp": "aiohttp",
    "datasets": "data sets of the hub",
    "flashinfer": "FlashInfer",
    "lm_eval": "lm_eval, and data sets of the hub",
    "schemathesis": "schemathesis",
}

# Each test compares with a literal that only its own model gives, as stated.
_OF_ANOTHER_MODEL = {
    r"openai/completion/test_completion\.py::test_single_completion": "number of prompt tokens",
    r"openai/completion/test_completion\.py::test_completion_streaming": "it does not stop early",
    r"chat_completion/test_chat\.py::test_single_chat_session": "number of prompt tokens",
    r"chat_completion/test_chat\.py::test_more_than_one_prompt_logprobs_chat": (
        "the token at one position has rank 1"
    ),
    r"chat_completion/test_chat\.py::test_complex_message_content": "its answer",
    r"chat_completion/test_chat\.py::test_response_format_json_object": "its answer",
    r"chat_completion/test_chat\.py::test_response_format_json_schema": "its answer",
    r"entrypoints/llm/test_chat\.py::test_chat_extra_kwargs": "a token <think>",
    r"samplers/test_no_bad_words\.py::TestOneTokenBadWord::": "its answer",
    r"samplers/test_no_bad_words\.py::TestTwoTokenBadWord::": "its answer",
    r"openai/test_return_token_ids\.py::test_comparison_with_prompt_logprobs_and_logprobs": (
        "it does not stop early"
    ),
    r"v1/sample/test_sampling_params_e2e\.py::test_(stop|bad_words)$": "its words differ",
    r"e2e/test_hybrid_chunked_prefill\.py::test_mtp_": "MTP layers, on four GPUs",
    r"detokenizer/test_stop_strings\.py::test_stop_strings": "its answer",
    r"chat_completion/test_include_reasoning\.py::.*(true|default)": "it thinks",
    r"test_correctness_sliding_window\.py::test_sliding_window_retrieval": "it recalls values",
    r"test_async_scheduling\.py::test_with(out|_eagle3)_spec": "it says 'the'",
    r"openai/completion/test_completion\.py::test_parallel_no_streaming": "it stops early",
    r"openai/test_return_token_ids\.py::test_chat_completion_with_tool_use": "it calls the tool",
    r"::test_structured_output_with_structural_tag": "it writes the trigger of a tag",
    r"detokenizer/test_disable_detokenization\.py::test_computed_prefix_blocks": (
        "it does not stop at once"
    ),
}

RULES: tuple[Rule, ...] = (
    *(_no(feature, words, name) for name, (feature, words) in examples.REFUSED.items()),
    *(_not_run(what, f"No module named '{name}") for name, what in _PACKAGES.items()),
    _not_run("it starts `python -m vllm`, which is not replaced", "No module named 'vllm'"),
    _not_run("a GPU", "Torch not compiled with CUDA|ATen_cuda|Cannot access accelerator"),
    _no("Harmony (gpt-oss)", "No module named 'openai_harmony|Harmony tests require gpt_oss"),
    _no("SageMaker", "/invocations|model-hosting-container-standards"),
    _no("SageMaker", "404", test="serve/sagemaker/"),
    _no("Responses API", "404", test="openai/responses/"),
    _no("draft heads (EAGLE, Medusa, DFlash)", r"speculative_config\.method = '(eagle|medusa|df)"),
    _no("draft heads (EAGLE, Medusa, DFlash)", r"(eagle|medusa)3? is not supported"),
    _no("ngram drafts computed on a GPU", r"speculative_config\.method = 'ngram_gpu'"),
    _no("tokenizers of mistral_common", "tokenizer_mode = 'mistral'"),
    _no("diffusion models", "no attribute 'verify'", test=r"::test_diffusion_"),
    _no(stand_in.ENGINE, "'SamplingParams' object has no attribute 'verify'"),
    _no("LoRA", r"LoRA adapters are not supported|`zephyr-lora` does not exist"),
    _no("LoRA", r"404|/not-downloaded/", test="serve/lora/test_lora_adapters"),
    # These list adapters, after a check of `root`, the path of the replaced model.
    _no(
        "LoRA",
        "'(SmolLM2-135M-Instruct|tiny-random-llama)' == ",
        test="::test_check_models|lora_lineage",
    ),
    _no("beam search", "(use_)?beam_search: is not supported|beam search is not supported"),
    _no(
        "beam search beside structured outputs",
        "structured_outputs = ",
        test="::test_beam_search_structured_output",
    ),
    _no("thinking_token_budget", "thinking_token_budget: is not supported"),
    _no("embeddings", "embeddings are not supported"),
    _no("embeddings", "404", test="::test_v2_endpoint_"),
    _no("logprobs_mode = raw_logits, processed_logits", "logprobs_mode = '(raw|processed)_logits'"),
    _no("changes of a config (hf_overrides)", "hf_overrides = .* is not supported"),
    _no(stand_in.SERVER, "No module named 'prometheus_fastapi_instrumentator"),
    _no(
        "another model: its JSON ends within the context",
        "Invalid JSON from backend|JSONDecodeError",
        test=r"::test_structured_output(_auto_mode|_batched_with_\w+)?\[",
    ),
    _no(
        "backends outlines, lm-format-enforcer",
        r"structured_outputs_config\.backend = '(outlines|lm-format-enforcer)'",
    ),
    _no(
        "another model: it thinks, and ends its calls of tools",
        r"None is not None|len\(\[\]\)",
        test="::test_function_tool_use",
    ),
    _no("batch files (run-batch)", "Batch process exited early", test="::test_metrics_exist_run"),
    _no(
        "batches of chats (/v1/chat/completions/batch)",
        "NotFoundError.* assert 404 == 200|404 - Not Found",
        test="test_batched_chat_completions",
    ),
    _no("stat loggers as classes", "stat_loggers = "),
    _no("streaming input", "prompt = <async_generator object", test="test_streaming_input"),
    _differs(
        "OpenAI: the chunk with the finish reason has no content",
        r"test_chat\.py::test_chat_streaming",
    ),
    _differs("OpenAI: a role that it does not have is refused", r"test_chat\.py::test_custom_role"),
    _differs(
        "bits do not depend on the batch, with and without VLLM_BATCH_INVARIANT",
        "::test_logprobs_without_batch_invariance_should_fail",
        "prompts matched between BS=1 and BS=N",
    ),
    _differs(
        "X-Request-Id is sent without --enable-request-id-headers, too",
        "::test_no_request_id_header",
        "'X-Request-Id' not in",
    ),
    _differs(
        "the words of the error",
        r"test_prompt_validation\.py::test_empty_prompt",
        "Actual message: 'Error code: 400 - prompt: must be",
    ),
    _differs(
        "OpenAI: usage always has prompt_tokens_details",
        r"test_orca_metrics\.py::test_single_completion",
        "CompletionUsa",
    ),
    _differs("the words of the error", r"test_chat\.py::test_long_seed", "seed = .* must be"),
    _differs(
        "OpenAI: logprobs is a boolean, top_logprobs is 0 to 20",
        r"test_chat_echo\.py::test_top_logprobs",
        "valid boolean",
    ),
    *(
        Rule(NOT_APPLICABLE, f"another model: {what}", rf"{name}")
        for name, what in _OF_ANOTHER_MODEL.items()
    ),
)


def result_of(entry: Mapping[str, Any]) -> Result:
    """The result of an entry of a record."""
    file, _, test = entry["id"].partition("::")
    test = test or WHOLE_FILE
    text, seconds = entry["reason"], entry["seconds"]
    if entry["outcome"] == "passed":
        return Result(file, test, PASSED, "", seconds)
    stated = re.fullmatch(r"not applicable: (.*) \(([^()]*)\)", text)
    if entry["outcome"] == "skipped" and stated:
        return _missing(file, test, stated[1], stated[2], seconds)
    for rule in RULES:
        if rule.fits(entry):
            return Result(file, test, rule.outcome, rule.reason, seconds)
    if entry["outcome"] == "skipped":
        text = text.removesuffix("Skipped")  # pytest's word for a skip without a reason
        return Result(file, test, NOT_RUN, f"skipped by the test: {text or 'no reason'}", seconds)
    return Result(file, test, FAILS, text, seconds)


def _missing(file: str, test: str, feature: str, name: str, seconds: float) -> Result:
    """A test that used a name that pagespec does not have."""
    if feature == "several GPUs":
        return Result(file, test, NOT_RUN, feature, seconds)
    prefix = f"{stand_in.PEER}."
    if not name.startswith(prefix):
        return Result(file, test, NOT_APPLICABLE, feature, seconds)
    # The feature as the table of names has it now; a record may be older.
    feature = stand_in.feature_of(name) or feature
    return Result(file, test, NOT_APPLICABLE, feature, seconds, name.removeprefix(prefix))
