"""``LLM(quantization="fp8")`` of models whose weights need special handling.

Either the checkpoint's names differ from the module's, or the module reads its weights in other
ways than through linear layers.
"""

from __future__ import annotations

import logging
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import PreTrainedModel

from pagespec import LLM, SamplingParams
from pagespec.compile.load import quantized_load
from pagespec.compile.load.load import load_model
from pagespec.errors import InvalidInputError, UnsupportedModelError
from tests.golden.harness import Condition, Subject, check, mixed_prompts, reference_of
from tests.support.models import VOCAB_SIZE, tiny_model
from tests.support.quantized_files import FP8_CONFIG, fp8_blocks, write_checkpoint, write_quantized

NUM_OUTPUTS = 6
CONDITION = Condition("budget 16", {"max_num_batched_tokens": 16, "max_num_seqs": 4})
READERS = ("jamba", "mamba", "falcon_mamba")


def linear_weights(model: nn.Module) -> dict[str, Tensor]:
    """The weights of all linear layers except the head."""
    linears = {n: m for n, m in model.named_modules() if isinstance(m, nn.Linear)}
    return {f"{n}.weight": m.weight for n, m in linears.items() if n != "lm_head"}


def save(folder: Path, arch: str) -> PreTrainedModel:
    """Save a model as transformers does; return the model with its FP8 values."""
    model = tiny_model(arch)
    model.save_pretrained(folder)
    with torch.no_grad():
        for weight in linear_weights(model).values():
            weight.copy_(fp8_blocks(weight)[1])
    return model


@pytest.mark.parametrize("arch", ["kimi_linear", "nemotron_h", "hrm_text", "falcon"])
def test_all_linear_layers_become_fp8(
    arch: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Layers that are renamed, all or some; that are parts of a tensor; that a model multiplies
    with as ``x @ weight.T``."""
    model = save(tmp_path, arch)
    saved, made = load_file(tmp_path / "model.safetensors"), linear_weights(model)
    assert (made.keys() <= saved.keys()) == (arch == "falcon")
    prompts = mixed_prompts([1, 17, 40], VOCAB_SIZE)
    reference = reference_of(model, prompts, [NUM_OUTPUTS] * len(prompts))
    caplog.set_level(logging.INFO, "pagespec")
    settings = {"device": "cpu", "quantization": "fp8", "max_model_len": 256}
    subject = Subject(arch, str(tmp_path), **settings)
    check(subject.run(CONDITION, reference), CONDITION)
    stats = subject.llm().stats()
    assert stats.weight_formats["fp8"] == sum(weight.numel() for weight in made.values())
    assert not made.keys() & set(stats.float32_matrices)
    assert "lm_head.weight" in stats.float32_matrices or model.config.tie_word_embeddings
    assert f"not quantised are {', '.join(stats.float32_matrices)}" in caplog.text


@pytest.mark.parametrize("arch", ["kimi_linear", "nemotron_h"])
def test_renamed_layers_are_read_one_by_one(arch: str, tmp_path: Path, reads: Counter[str]) -> None:
    save(tmp_path, arch)
    loaded = load_model(str(tmp_path), quantization="fp8", max_model_len=256)
    assert max(reads.values()) == 1
    held = dict(loaded.module.named_parameters())
    assert loaded.quantized.keys() == linear_weights(loaded.module).keys()
    for name in loaded.quantized:
        assert held[name].untyped_storage().nbytes() == 4
        assert held[name].isnan().all()


def test_a_second_start_is_like_the_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PAGESPEC_CACHE", str(tmp_path / "cache"))
    save(tmp_path, "kimi_linear")
    answers, formats = [], []
    for _ in range(2):
        llm = LLM(tmp_path, device="cpu", quantization="fp8", num_blocks=16, max_model_len=256)
        [output] = llm.generate([[5, 9, 7]], SamplingParams(temperature=0, max_tokens=6))
        answers.append(output.outputs[0].token_ids)
        formats.append(llm.stats().weight_formats)
    assert answers[0] == answers[1]
    assert formats[0] == formats[1]


def test_a_quantised_checkpoint_with_names_of_the_base_model(tmp_path: Path) -> None:
    """transformers adds the prefix; a layer's name with and without it means the same layer."""
    model = write_quantized(tmp_path, "fp8 blocks")
    path = tmp_path / "model.safetensors"
    renamed = {name.removeprefix("model."): tensor for name, tensor in load_file(path).items()}
    save_file(renamed, path, {"format": "pt"})
    prompts = mixed_prompts([3, 20], VOCAB_SIZE)
    reference = reference_of(model, prompts, [NUM_OUTPUTS] * len(prompts))
    subject = Subject("llama", str(tmp_path), device="cpu")
    check(subject.run(CONDITION, reference), CONDITION)


@pytest.mark.parametrize("arch", READERS)
def test_weights_that_a_model_reads_itself_are_refused_before_any_is_read(
    arch: str, tmp_path: Path, reads: Counter[str]
) -> None:
    save(tmp_path, arch)
    with pytest.raises(InvalidInputError, match=r"the weight of \S*dt_proj by more") as caught:
        LLM(tmp_path, device="cpu", quantization="fp8", max_model_len=256)
    assert (caught.value.field, caught.value.value) == ("quantization", "fp8")
    assert not reads


@pytest.mark.parametrize("settings", [{}, {"load_format": "dummy"}], ids=["read", "dummy"])
def test_what_shows_in_the_probe_alone_is_refused_the_same_way(
    settings: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A forward pass without data does not reach the code that is rejected."""
    monkeypatch.setattr(quantized_load, "check_readers", lambda *_, **__: None)
    save(tmp_path, "jamba")
    with pytest.raises(InvalidInputError, match=r"the weight of \S*dt_proj by more") as caught:
        LLM(tmp_path, device="cpu", quantization="fp8", **settings)
    assert (caught.value.field, caught.value.value) == ("quantization", "fp8")


def test_of_a_quantised_checkpoint_it_is_the_model_that_is_refused(tmp_path: Path) -> None:
    model = tiny_model("mamba")
    made = linear_weights(model)
    tensors: dict[str, Tensor] = {}
    for name, parameter in model.named_parameters():
        parts = fp8_blocks(parameter.detach())[0] if name in made else {"": parameter.detach()}
        layer = name.removesuffix(".weight")
        tensors |= {f"{layer}.{end}" if end else name: part for end, part in parts.items()}
    write_checkpoint(tmp_path, model, tensors, {**FP8_CONFIG, "modules_to_not_convert": []})
    with pytest.raises(UnsupportedModelError, match=r"dt_proj by more than its linear layer, and"):
        LLM(tmp_path, device="cpu", max_model_len=256)


def test_a_model_without_linear_layers_is_refused(tmp_path: Path) -> None:
    tiny_model("gpt2").save_pretrained(tmp_path)
    with pytest.raises(UnsupportedModelError, match="has no linear layer except its head"):
        load_model(str(tmp_path), quantization="fp8")
