"""Why a test of vLLM that does not pass is expected not to.

A skipped test names its feature itself. A failed one is looked up in ``RULES``; without a rule it
counts as failing because of pagespec.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

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
    "datasets": "data sets of the hub",
    "flashinfer": "internal",
    "lm_eval": "data sets of the hub",
    "model_hosting_container_standards": "SageMaker",
    "openai_harmony": "Harmony (gpt-oss)",
    "prometheus_fastapi_instrumentator": "internal",
}

RULES: tuple[Rule, ...] = (
    *(_no(feature, message=f"No module named '{name}") for name, feature in _PACKAGES.items()),
    _no("internal", message="Torch not compiled with CUDA|ATen_cuda|simple_compile_backend"),
    _no("LoRA", message=r"LoRA|enable_lora|zephyr-lora"),
    _no("LoRA", test="zephyr-lora"),
    _no("beam search", message="beam search"),
    _no("beam search", test="beam_search"),
    _no("embeddings", message="embeddings are not supported"),
)


def result_of(entry: Mapping[str, Any]) -> Result:
    """The result of an entry of a record."""
    file, _, test = entry["id"].partition("::")
    test = test or WHOLE_FILE
    text, seconds = entry["reason"], entry["seconds"]
    if entry["outcome"] == "passed":
        return Result(file, test, PASSED, "", seconds)
    if entry["outcome"] == "skipped":
        stated = re.match(r"not applicable: (.*?) \(", text)
        return Result(file, test, NOT_APPLICABLE, stated[1] if stated else text, seconds)
    for rule in RULES:
        if rule.fits(entry):
            return Result(file, test, rule.outcome, rule.reason, seconds)
    return Result(file, test, FAILS, text, seconds)
