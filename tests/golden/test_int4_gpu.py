"""Whole engines with 4-bit and 8-bit weights on a GPU: bit-identical to the dequantised model.

Also tests that the schedule changes no bit.
"""

from __future__ import annotations

import functools
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from pagespec import LLM, SamplingParams
from pagespec.engine.plan import StepPlan
from pagespec.verify import run_gate
from tests.golden.harness import mixed_prompts
from tests.golden.subjects import QUANTIZED_GATE_SIZE
from tests.support.gguf_files import gguf_model
from tests.support.models import VOCAB_SIZE
from tests.support.quantized_files import write_quantized

pytestmark = pytest.mark.gpu

# Beside float32 on a CPU; a model in bfloat16 has it too.
BFLOAT16_ERROR = 0.05
# Steps of up to 160 rows, of which some are multiplied by weights that are dequantised before.
SETTINGS: dict[str, Any] = {
    "dtype": "bfloat16",
    "num_blocks": 64,
    "max_model_len": 256,
    "max_num_seqs": 4,
    "max_num_batched_tokens": 160,
}


@functools.cache
def subject(layout: str) -> tuple[str, str]:
    """The folders of a checkpoint, and of its dequantised weights."""
    folder = Path(tempfile.mkdtemp())
    (folder / "quantised").mkdir()
    write_quantized(folder / "quantised", layout).save_pretrained(folder / "plain")
    return str(folder / "quantised"), str(folder / "plain")


class Recorder:
    """Keeps the logits of every sampled token; see ``LLM(on_logits=...)``."""

    def __init__(self) -> None:
        self.logits: dict[tuple[str, int], Tensor] = {}

    def __call__(self, plan: StepPlan, logits: Tensor) -> None:
        sampled = [row for row in plan.rows() if row[3]]
        for (request, start, n, _), row_logits in zip(sampled, logits, strict=True):
            index = start + n - request.num_prompt_tokens
            self.logits[request.request_id, index] = row_logits.float().cpu()


def answers(model: str, **settings: Any) -> tuple[list[list[int]], list[Tensor], LLM]:
    """Tokens, and the logits of each request in order."""
    recorder = Recorder()
    llm = LLM(model, on_logits=recorder, **settings)
    prompts = mixed_prompts([3, 20, 130], VOCAB_SIZE)
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    outputs = llm.generate(prompts, params, use_tqdm=False)
    tokens = [list(output.outputs[0].token_ids) for output in outputs]
    logits = [
        torch.stack([recorder.logits[output.request_id, i] for i in range(8)]) for output in outputs
    ]
    return tokens, logits, llm


def check_equal(quantised: str, plain: str, **own: Any) -> None:
    tokens, logits, llm = answers(quantised, device="cuda", **SETTINGS, **own)
    expected_tokens, expected, _ = answers(plain, device="cuda", **SETTINGS)
    differences = [(a - b).abs().max().item() for a, b in zip(logits, expected, strict=True)]
    print(llm.stats().quantization, llm.stats().weight_formats, differences)
    assert tokens == expected_tokens
    assert differences == [0.0] * len(differences)


@pytest.mark.parametrize("layout", ["awq", "gptq asymmetric", "packed int4"])
def test_equals_the_dequantised_model_in_bfloat16(layout: str) -> None:
    check_equal(*subject(layout))


@pytest.mark.parametrize("layout", ["gptq", "gptq sorted", "packed int4 sorted"])
def test_beside_the_cpu(layout: str) -> None:
    """Layers with sorted inputs have their own order of summation."""
    quantised, _ = subject(layout)
    _, logits, llm = answers(quantised, device="cuda", **SETTINGS)
    assert llm.stats().weight_formats["int4"] > 0
    _, expected, _ = answers(quantised, device="cpu", num_blocks=64, max_model_len=256)
    # Of first tokens, as later ones follow what was chosen.
    for found, exact in zip(logits, expected, strict=True):
        assert (found[0] - exact[0]).abs().max() < BFLOAT16_ERROR * exact[0].abs().max()


def test_answers_do_not_depend_on_the_schedule() -> None:
    def make_llm(**arguments: Any) -> LLM:
        path, _ = subject("packed int4")
        settings = {"check_invariants": True, "max_model_len": 512, **arguments}
        return LLM(path, device="cuda", dtype="bfloat16", **settings)

    # In bfloat16 so small a model's control is equal, too; tests/verify/test_gate_gpu.py has one
    # that is not.
    report = run_gate(
        make_llm,
        vocabulary=VOCAB_SIZE,
        block_size=16,
        size=QUANTIZED_GATE_SIZE,
        with_control=False,
    )
    assert [f.first_difference for f in report.groups if f.num_different] == []
    assert all(group.num_cases > 0 for group in report.groups)
    assert report.is_transparent


@pytest.mark.parametrize("form", ["Q4_1", "Q8_0"])
def test_gguf_equals_its_conversion_in_bfloat16(
    form: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = gguf_model(tmp_path, monkeypatch, form)
    from pagespec.compile.load.source import find_source

    check_equal(path, find_source(path).files, quantization="gguf")
