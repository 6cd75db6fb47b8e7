"""Quantised checkpoints against `generate` of a model with the dequantised weights, in float32."""

from __future__ import annotations

import copy
import functools
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from pagespec import LLM, SamplingParams
from pagespec.kernels.matmul.cpu import quantized as cpu_quantized
from pagespec.verify import run_gate
from tests.golden.harness import (
    Condition,
    Reference,
    Subject,
    check,
    mixed_prompts,
    reference_of,
)
from tests.golden.subjects import (
    QUANTIZED_CONDITIONS,
    QUANTIZED_GATE_SIZE,
    QUANTIZED_NUM_OUTPUTS,
    QUANTIZED_PROMPT_LENGTHS,
)
from tests.support.models import VOCAB_SIZE
from tests.support.quantized_files import INT4_LAYOUTS, LAYOUTS, left_in, write_quantized

# Roundings of rows and results that fall the other way, as sums have another order.
INT4_RELATIVE_ERROR = 2e-2
needs_int4 = pytest.mark.skipif(
    cpu_quantized.reason_against() is not None, reason=str(cpu_quantized.reason_against())
)


@functools.cache
def written(layout: str) -> tuple[tempfile.TemporaryDirectory[str], PreTrainedModel]:
    folder = tempfile.TemporaryDirectory()
    return folder, write_quantized(Path(folder.name), layout)


@functools.cache
def subject_of(layout: str, *, expands: bool = False) -> Subject:
    """With ``expands``, as on a machine without 4-bit instructions."""
    subject = Subject(layout, written(layout)[0].name, device="cpu")
    with pytest.MonkeyPatch.context() as patch:
        if expands:
            patch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "DEFAULT")
        subject.llm(num_blocks=4)
    return subject


@functools.cache
def expected_of(layout: str) -> Reference:
    prompts = mixed_prompts(QUANTIZED_PROMPT_LENGTHS, VOCAB_SIZE)
    return reference_of(written(layout)[1], prompts, [QUANTIZED_NUM_OUTPUTS] * len(prompts))


@pytest.mark.parametrize("condition", QUANTIZED_CONDITIONS, ids=lambda c: c.name.replace(" ", "-"))
@pytest.mark.parametrize("layout", LAYOUTS)
def test_equals_generate_with_the_dequantised_weights(layout: str, condition: Condition) -> None:
    """In 4 bits only where weights are expanded."""
    subject = subject_of(layout, expands=layout in INT4_LAYOUTS)
    check(subject.run(condition, expected_of(layout)), condition)


@needs_int4
@pytest.mark.parametrize("layout", INT4_LAYOUTS)
def test_int4_is_near_linear_layers_that_round_to_bfloat16(layout: str) -> None:
    """Only first logits are compared: one different rounding may change later tokens."""
    model = copy.deepcopy(written(layout)[1])
    for name, part in model.named_modules():
        if "proj" in name and name not in left_in(layout):
            part.register_forward_pre_hook(lambda _, given: (given[0].bfloat16().float(),))
            part.register_forward_hook(lambda _, __, output: output.bfloat16().float())
    prompts = mixed_prompts(QUANTIZED_PROMPT_LENGTHS, VOCAB_SIZE)
    row = subject_of(layout).run(
        QUANTIZED_CONDITIONS[0], reference_of(model, prompts, [1] * len(prompts))
    )
    assert row.max_relative_error < INT4_RELATIVE_ERROR, str(row)


@pytest.mark.parametrize(
    "layout",
    [
        "fp8 blocks",
        *(
            pytest.param(layout, marks=pytest.mark.nightly)
            for layout in ("fp8 channels", "awq", "gptq", "packed int4")
        ),
    ],
)
def test_answers_do_not_depend_on_the_schedule(layout: str) -> None:
    folder = written(layout)[0].name
    subjects = {is_on: Subject(layout, folder, device="cpu") for is_on in (True, False)}

    def make_llm(**arguments: Any) -> LLM:
        subject = subjects[arguments.get("transparent", True)]
        return subject.llm(check_invariants=True, **arguments)

    report = run_gate(make_llm, vocabulary=VOCAB_SIZE, block_size=8, size=QUANTIZED_GATE_SIZE)
    assert [f.first_difference for f in report.groups if f.num_different] == []
    assert report.num_hit_blocks > 10
    assert report.num_preemptions
    assert report.is_transparent
    assert report.has_power


@pytest.mark.parametrize("layout", ["fp8 blocks", "packed int4"])
def test_scores_equal_sampled_logprobs(layout: str) -> None:
    llm = subject_of(layout).llm(num_blocks=64)
    sampling = SamplingParams(temperature=0.8, seed=3, max_tokens=8, logprobs=2)
    prompts = mixed_prompts([5, 3, 40], VOCAB_SIZE)
    for prompt, result in zip(prompts, llm.generate(prompts, sampling), strict=True):
        output = result.outputs[0]
        text = [*prompt, *output.token_ids]
        [scored] = llm.generate([text], SamplingParams(max_tokens=1, prompt_logprobs=0))
        assert scored.prompt_logprobs is not None
        assert output.logprobs is not None
        for place, (token, entry) in enumerate(
            zip(output.token_ids, output.logprobs, strict=True), len(prompt)
        ):
            found = scored.prompt_logprobs[place]
            assert found is not None
            assert found[token].logprob == entry[token].logprob
