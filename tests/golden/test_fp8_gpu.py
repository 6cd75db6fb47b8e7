"""FP8 weights on a GPU, whole engines: beside the dequantised weights in float32, and schedules."""

from __future__ import annotations

import functools
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from pagespec import LLM, SamplingParams
from pagespec.engine.plan import StepPlan
from pagespec.verify import run_gate
from tests.golden.harness import mixed_prompts
from tests.golden.subjects import QUANTIZED_GATE_SIZE
from tests.support.models import tiny_model
from tests.support.quantized_files import (
    fp8_blocks,
    left_in,
    write_checkpoint,
    write_quantized,
)

pytestmark = pytest.mark.gpu

VOCAB_SIZE = 512
# Of logits, beside the largest of a position: rows are rounded to 3 bits, and the reference's are
# not. Where its rows are rounded so, too, what is left comes of bfloat16.
WEIGHTS_ONLY_ERROR = 0.15
SAME_ROWS_ERROR = 0.06


@functools.cache
def plain() -> tuple[tempfile.TemporaryDirectory[str], PreTrainedModel]:
    """A bfloat16 checkpoint whose widths are multiples of 128, and what FP8 makes of it, in
    float32."""
    model = tiny_model(
        "qwen3",
        vocab_size=VOCAB_SIZE,
        hidden_size=256,
        intermediate_size=512,
        num_attention_heads=8,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=2048,
    )
    folder = tempfile.TemporaryDirectory()
    tensors = {name: p.detach().bfloat16() for name, p in model.named_parameters()}
    write_checkpoint(Path(folder.name), model, tensors, None)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            made = fp8_blocks(tensors[name])[1] if "proj" in name else tensors[name]
            parameter.copy_(made)
    return folder, model


@functools.cache
def subject(layout: str) -> tuple[Path, PreTrainedModel, dict[str, Any]]:
    """The folder of a checkpoint, its model with the dequantised weights, and settings."""
    if layout == "made at load":
        folder, model = plain()
        return Path(folder.name), model, {"quantization": "fp8"}
    path = Path(tempfile.mkdtemp())
    return path, write_quantized(path, layout), {}


def engine(layout: str, **settings: Any) -> LLM:
    path, _, own = subject(layout)
    return LLM(str(path), device="cuda", dtype="bfloat16", **{**own, **settings})


class Recorder:
    """Keeps the logits of every sampled token; see ``LLM(on_logits=...)``."""

    def __init__(self) -> None:
        self.logits: dict[tuple[str, int], Tensor] = {}

    def __call__(self, plan: StepPlan, logits: Tensor) -> None:
        sampled = [row for row in plan.rows() if row[3]]
        for (request, start, n, _), row_logits in zip(sampled, logits, strict=True):
            index = start + n - request.num_prompt_tokens
            self.logits[request.request_id, index] = row_logits.float().clone()


def rounded_rows(_: nn.Module, given: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """As the kernels round rows: to bfloat16, then by 128 channels to e4m3."""
    x = given[0].bfloat16().float()
    groups = x.split(128, -1)
    scales = [(part.abs().amax(-1, keepdim=True) / 448).clamp_min(2.0**-126) for part in groups]
    made = [
        (part / scale).to(torch.float8_e4m3fn).float() * scale
        for part, scale in zip(groups, scales, strict=True)
    ]
    return (torch.cat(made, -1),)


@pytest.mark.parametrize("layout", ["made at load", "fp8 blocks", "fp8 channels", "fp8 tensors"])
def test_logits_beside_the_dequantised_weights(layout: str) -> None:
    _, model, _ = subject(layout)
    model = model.to("cuda")
    recorder = Recorder()
    llm = engine(layout, on_logits=recorder, max_num_batched_tokens=64, max_model_len=512)
    prompts = mixed_prompts([3, 20, 130], int(model.config.vocab_size))
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    outputs = llm.generate(prompts, params, use_tqdm=False)
    assert llm.stats().weight_formats["fp8"] > 0
    assert set(llm.stats().weight_formats) == {"fp8", "bfloat16"}
    assert llm.stats().quantization is not None
    assert llm.stats().quantization.startswith("fp8 e4m3")
    left = left_in(layout) if layout != "made at load" else ()
    hooks = []
    for bound, is_rounded in ((WEIGHTS_ONLY_ERROR, False), (SAME_ROWS_ERROR, True)):
        if is_rounded:
            for name, part in model.named_modules():
                if "proj" in name and name not in left and isinstance(part, nn.Linear):
                    hooks.append(part.register_forward_pre_hook(rounded_rows))
        worst = 0.0
        for prompt, output in zip(prompts, outputs, strict=True):
            tokens = list(output.outputs[0].token_ids)
            ids = torch.tensor([prompt + tokens[:-1]], device="cuda")
            with torch.inference_mode():
                expected = model(ids, use_cache=False, logits_to_keep=len(tokens)).logits[0].float()
            for index, row in enumerate(expected):
                found = recorder.logits[output.request_id, index]
                size = row.abs().max()
                worst = max(worst, ((found - row).abs().max() / size).item())
                # What was chosen is the reference's best, or as good within the bound.
                assert row.max() - row[tokens[index]] <= 2 * bound * size
        print(f"{layout}, rows rounded in the reference {is_rounded}: {worst:.4f}")
        assert worst < bound
    for hook in hooks:
        hook.remove()


@pytest.mark.parametrize("layout", ["made at load", "fp8 blocks"])
def test_scores_equal_sampled_logprobs(layout: str) -> None:
    llm = engine(layout, max_model_len=512)
    sampling = SamplingParams(temperature=0.8, seed=3, max_tokens=12, logprobs=2)
    prompts = mixed_prompts([5, 3, 40, 150], 200)
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


def test_answers_do_not_depend_on_the_schedule() -> None:
    def make_llm(**arguments: Any) -> LLM:
        return engine("made at load", check_invariants=True, max_model_len=512, **arguments)

    report = run_gate(make_llm, vocabulary=VOCAB_SIZE, block_size=16, size=QUANTIZED_GATE_SIZE)
    assert [f.first_difference for f in report.groups if f.num_different] == []
    assert report.is_transparent
    assert report.has_power


def test_random_weights_take_a_byte_each() -> None:
    _, model, _ = subject("made at load")
    before = torch.cuda.memory_allocated()
    llm = engine("made at load", load_format="dummy", num_blocks=64, max_model_len=512)
    num_fp8 = llm.stats().weight_formats["fp8"]
    num_others = sum(p.numel() for p in model.parameters()) - num_fp8
    assert num_fp8 == sum(p.numel() for n, p in model.named_parameters() if "proj" in n)
    assert llm.stats().memory_bytes["weights"] < before + 1.4 * num_fp8 + 2 * num_others + (8 << 20)
    [output] = llm.generate([[1, 2, 3]], SamplingParams(max_tokens=4, ignore_eos=True))
    assert len(output.outputs[0].token_ids) == 4
