"""Whole engines with FP8 weights on a GPU, against the dequantised weights in float32.

Also tests that the schedule changes no bit.
"""

from __future__ import annotations

import copy
import functools
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from pagespec import LLM, SamplingParams
from pagespec.compile.load.load import load_model
from pagespec.engine.plan import StepPlan
from pagespec.verify import run_gate
from tests.golden.harness import mixed_prompts
from tests.golden.subjects import QUANTIZED_GATE_SIZE
from tests.support.models import tiny_model
from tests.support.quantized_files import fp8_blocks, write_checkpoint, write_quantized

pytestmark = pytest.mark.gpu

VOCAB_SIZE = 512
# Of logits, beside the largest of a position. The rows of the reference are not rounded to 3 bits.
WEIGHTS_ONLY_ERROR = 0.35
# Its linear layers are the kernels called one by one. What other operations round otherwise makes
# other e4m3 of some numbers, in float32 of hardly any.
SAME_LAYERS_ERROR = {"bfloat16": 0.3, "float32": 0.03}


@functools.cache
def plain() -> tuple[tempfile.TemporaryDirectory[str], PreTrainedModel]:
    """A bfloat16 checkpoint whose widths are multiples of 128, and its FP8 values in float32."""
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
    return LLM(str(path), device="cuda", **{"dtype": "bfloat16", **own, **settings})


class Recorder:
    """Keeps the logits of every sampled token; see ``LLM(on_logits=...)``."""

    def __init__(self) -> None:
        self.logits: dict[tuple[str, int], Tensor] = {}

    def __call__(self, plan: StepPlan, logits: Tensor) -> None:
        sampled = [row for row in plan.rows() if row[3]]
        for (request, start, n, _), row_logits in zip(sampled, logits, strict=True):
            index = start + n - request.num_prompt_tokens
            self.logits[request.request_id, index] = row_logits.float().clone()


def calls_kernels(model: PreTrainedModel, weights: dict[str, Any]) -> PreTrainedModel:
    """A copy whose quantised layers call the kernel, for any dtype."""
    from pagespec.kernels.matmul.quantized import dispatch_fp8

    model = copy.deepcopy(model)
    for name, weight in weights.items():
        parts = dispatch_fp8.pack(weight)
        layer = model.get_submodule(name.removesuffix(".weight"))
        layer.forward = functools.partial(
            lambda parts, x: dispatch_fp8.linear(x, *parts).view(*x.shape[:-1], -1), parts
        )
    return model


@pytest.mark.parametrize(
    ("layout", "dtype"),
    [
        ("made at load", "bfloat16"),
        ("fp8 channels", "bfloat16"),
        ("fp8 blocks", "float32"),
    ],
)
def test_logits_beside_the_dequantised_weights(layout: str, dtype: str) -> None:
    path, model, own = subject(layout)
    model = model.to("cuda")
    recorder = Recorder()
    llm = engine(
        layout, on_logits=recorder, dtype=dtype, max_num_batched_tokens=64, max_model_len=512
    )
    prompts = mixed_prompts([3, 20, 130], int(model.config.vocab_size))
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    outputs = llm.generate(prompts, params, use_tqdm=False)
    assert llm.stats().weight_formats["fp8"] > 0
    assert set(llm.stats().weight_formats) == {"fp8", dtype}
    assert llm.stats().quantization is not None
    assert llm.stats().quantization.startswith("fp8 e4m3")
    loaded = load_model(path, device="cuda", dtype=dtype, **own)
    assert all(weight is not None for weight in loaded.quantized.values())
    for reference, bound in (
        (model, WEIGHTS_ONLY_ERROR),
        (calls_kernels(model, loaded.quantized), SAME_LAYERS_ERROR[dtype]),
    ):
        worst = 0.0
        for prompt, output in zip(prompts, outputs, strict=True):
            tokens = list(output.outputs[0].token_ids)
            ids = torch.tensor([prompt + tokens[:-1]], device="cuda")
            with torch.inference_mode():
                logits = reference(ids, use_cache=False, logits_to_keep=len(tokens)).logits
            for index, row in enumerate(logits[0].float()):
                found = recorder.logits[output.request_id, index]
                size = row.abs().max()
                worst = max(worst, ((found - row).abs().max() / size).item())
                # What was chosen is the reference's best, or as good within the bound.
                assert row.max() - row[tokens[index]] <= 2 * bound * size
        print(f"{layout} {dtype}: {worst:.4f}, bound {bound}")
        assert worst < bound


def test_scores_equal_sampled_logprobs() -> None:
    llm = engine("made at load", max_model_len=512)
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
        return engine("made at load", check_invariants=True, **arguments)

    report = run_gate(
        make_llm,
        vocabulary=VOCAB_SIZE,
        block_size=16,
        size=QUANTIZED_GATE_SIZE,
        with_control=False,
    )
    assert [f.first_difference for f in report.groups if f.num_different] == []
    assert all(group.num_cases > 0 for group in report.groups)
    assert report.num_preemptions > 0
    assert report.num_hit_blocks > 0


def test_without_transparency_answers_differ(tmp_path: Path) -> None:
    """A control: without a difference here, the gate would prove nothing. It runs in its own
    process, since the gate's library settings apply to a whole process. In the second control, the
    model's own operations, K of a wide down projection is split at few rows."""
    sizes = {"hidden_size": 576, "intermediate_size": 8192, "num_attention_heads": 8}
    model = tiny_model("qwen3", head_dim=64, **sizes)
    model.config.dtype = torch.bfloat16
    model.config.save_pretrained(tmp_path)
    arguments = ["--load-format", "dummy", "--device", "cuda", "--dtype", "bfloat16", "--quick"]
    command = [sys.executable, "-m", "pagespec.cli", "verify", "--model", str(tmp_path)]
    result = subprocess.run(
        [*command, *arguments, "--quantization", "fp8", "--only-control"],
        capture_output=True,
        text=True,
        check=True,
    )
    controls = json.loads(result.stdout.strip().splitlines()[-1])
    assert controls[-1]["num_different"] > 0, controls


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
