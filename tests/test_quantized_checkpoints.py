"""Quantised checkpoints and ``LLM(quantization="fp8")``: reads, memory, reports and rejections."""

from __future__ import annotations

import json
import logging
import weakref
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from pagespec import LLM, SamplingParams
from pagespec.compile.captured_model import capture_model
from pagespec.compile.fx.check_graph import Bindings, verify_graph
from pagespec.compile.load import quantization_schemes
from pagespec.compile.load.load import load_model
from pagespec.compile.model.loaded import Shard
from pagespec.compile.probe.probe import probe_model
from pagespec.errors import InvalidInputError, UnsupportedModelError
from pagespec.kernels.matmul.quantized.quantized_weight import Int4Weight
from tests.golden.harness import Condition, Subject, check, mixed_prompts, reference_of
from tests.support.captures import graph_cache
from tests.support.models import VOCAB_SIZE, save_word_model, tiny_model
from tests.support.quantized_files import (
    AWQ_CONFIG,
    FP8_CONFIG,
    GPTQ_CONFIG,
    LAYOUTS,
    LEFT,
    SIZES,
    fp8_blocks,
    fp8_rows,
    write_checkpoint,
    write_mxfp4,
    write_quantized,
)

NUM_OUTPUTS = 8


def plain_checkpoint(folder: Path) -> nn.Module:
    """A bfloat16 checkpoint, and its FP8 values in float32."""
    model = tiny_model("llama", **SIZES)
    tensors = {name: p.detach().bfloat16() for name, p in model.named_parameters()}
    write_checkpoint(folder, model, tensors, None)
    for name, parameter in model.named_parameters():
        is_made = "proj" in name
        with torch.no_grad():
            parameter.copy_(fp8_blocks(tensors[name])[1] if is_made else tensors[name])
    return model


def test_fp8_at_load_equals_generate(tmp_path: Path) -> None:
    model = plain_checkpoint(tmp_path)
    prompts = mixed_prompts([1, 17, 40], VOCAB_SIZE)
    reference = reference_of(model, prompts, [NUM_OUTPUTS] * len(prompts))
    condition = Condition("budget 16", {"max_num_batched_tokens": 16, "max_num_seqs": 4})
    subject = Subject("llama", str(tmp_path), device="cpu", quantization="fp8")
    check(subject.run(condition, reference), condition)


def test_fp8_at_load_holds_one_layer_at_a_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, reads: Counter[str]
) -> None:
    plain_checkpoint(tmp_path)
    seen: list[weakref.ref[Tensor]] = []
    quantize = quantization_schemes.quantize_fp8

    def watched(weight: Tensor) -> Any:
        assert [earlier for earlier in seen if earlier() is not None] == []
        seen.append(weakref.ref(weight))
        return quantize(weight)

    monkeypatch.setattr(quantization_schemes, "quantize_fp8", watched)
    loaded = load_model(str(tmp_path), quantization="fp8")
    assert len(seen) == len(loaded.quantized) == 2 * 7
    assert max(reads.values()) == 1
    held = dict(loaded.module.named_parameters())
    for name in loaded.quantized:
        assert held[name].untyped_storage().nbytes() == 4
        assert held[name].isnan().all()


@pytest.mark.parametrize("layout", ["fp8 blocks", "awq"])
def test_the_graph_holds_quantised_weights_alone(
    tmp_path: Path, layout: str, reads: Counter[str]
) -> None:
    write_quantized(tmp_path, layout)
    loaded = load_model(str(tmp_path))
    assert max(reads.values()) == 1
    names = set(loaded.quantized)
    num_quantized = sum(p.numel() for n, p in loaded.module.named_parameters() if n in names)
    assert not any(f"{layer}.weight" in names for layer in LEFT)
    captured = capture_model(loaded, probe_model(loaded), graph_cache=graph_cache())
    assert captured.graph is not None
    assert not loaded.quantized
    # The queries, keys and values of a layer are one matmul, gate and up another.
    assert captured.rewrites["merge_linear"] == 2 * 3
    places = dict(
        zip(
            (n.name for n in captured.graph.graph.find_nodes(op="placeholder")),
            captured.sources,
            strict=True,
        )
    )
    constants = {name: s[1] for name, s in places.items() if s[0] == "constant"}
    others = {name: s[1] for name, s in places.items() if s[0] != "constant"}
    verify_graph(captured.graph, "cpu", Bindings(constants, others))
    format = "fp8" if layout == "fp8 blocks" else "int4"
    held = {name: t for name, t in constants.items() if name.startswith(f"{format}_")}
    # Scales take 4 bytes for 128 inputs, or for 32 a scale and a zero point in bfloat16.
    most = num_quantized * (1 + 4 / 80 if format == "fp8" else 0.5 + 4 / 32)
    assert num_quantized / 2 <= sum(t.nbytes for t in held.values()) <= most
    left = {name for name, p in loaded.module.named_parameters() if not p.isnan().any()}
    assert {name for name in left if "proj" in name or "head" in name} == {
        f"{layer}.weight" for layer in LEFT
    }
    assert captured.weight_formats[format] == num_quantized


def test_stats_and_log(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    write_quantized(tmp_path, "fp8 channels")
    caplog.set_level(logging.INFO, "pagespec")
    stats = LLM(str(tmp_path), device="cpu", num_blocks=4).stats()
    assert stats.quantization == "fp8 e4m3 with a scale for each channel"
    assert set(stats.weight_formats) == {"fp8", "float32"}
    assert stats.float32_matrices == [
        "model.embed_tokens.weight",
        "model.layers.1.mlp.down_proj.weight",
        "lm_head.weight",
    ]
    assert f"quantization: {stats.quantization}: " in caplog.text
    assert "model.layers.1.mlp.down_proj.weight" in caplog.text


def test_started_twice_and_without_transparency(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second start reads the graph of the first."""
    monkeypatch.setenv("PAGESPEC_CACHE", str(tmp_path / "cache"))
    write_quantized(tmp_path, "fp8 blocks")
    sampling = SamplingParams(temperature=0, max_tokens=6)
    answers = []
    for transparent in (True, True, False):
        llm = LLM(str(tmp_path), device="cpu", num_blocks=8, transparent=transparent)
        [output] = llm.generate([[5, 9, 7]], sampling)
        answers.append(output.outputs[0].token_ids)
    assert llm.stats().num_captures == 0
    assert answers[0] == answers[1] == answers[2]


CHANNEL = LAYOUTS["fp8 channels"][0]
PACKED = LAYOUTS["packed int4"][0]


def changed(config: dict[str, Any], *path: str, to: object) -> dict[str, Any]:
    """A copy of ``config`` with one entry changed."""
    copy: dict[str, Any] = json.loads(json.dumps(config))
    *parents, last = path
    part = copy
    for name in parents:
        part = part[name]
    part[last] = to
    return copy


WEIGHTS = ("config_groups", "group_0", "weights")
ACTIVATIONS = ("config_groups", "group_0", "input_activations")


@pytest.mark.parametrize(
    ("config", "named"),
    [
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, "quant_method = 'bitsandbytes'"),
        ({"quant_method": "hqq"}, "known are fp8, compressed-tensors, awq, gptq"),
        (changed(FP8_CONFIG, "activation_scheme", to="static"), "activation_scheme = 'static'"),
        (changed(FP8_CONFIG, "weight_block_size", to=[64, 64]), r"weight_block_size = \[64, 64\]"),
        (changed(FP8_CONFIG, "weight_block_size", to=None), "weight_block_size = None"),
        (changed(FP8_CONFIG, "fmt", to="e5m2"), "fmt = 'e5m2'"),
        (changed(CHANNEL, "format", to="int-quantized"), "format = 'int-quantized'"),
        (changed(CHANNEL, "kv_cache_scheme", to={"num_bits": 8}), "kv_cache_scheme"),
        (changed(CHANNEL, *ACTIVATIONS, "dynamic", to=False), "input_activations.dynamic = False"),
        (changed(CHANNEL, *WEIGHTS, "strategy", to="block"), "weights.strategy = 'block'"),
        (changed(CHANNEL, "config_groups", "two", to={}), "only one explicit group is supported"),
        (changed(PACKED, *WEIGHTS, "num_bits", to=8), "weights.num_bits = 8"),
        (changed(PACKED, *WEIGHTS, "actorder", to="random"), "weights.actorder = 'random'"),
        (changed(AWQ_CONFIG, "bits", to=8), "bits = 8"),
        (changed(AWQ_CONFIG, "version", to="gemv"), "version = 'gemv'"),
        (changed(GPTQ_CONFIG, "bits", to=3), "bits = 3"),
        (changed(GPTQ_CONFIG, "dynamic", to={"-:.*": {}}), "dynamic"),
    ],
)
def test_unknown_schemes_are_refused_by_name(
    tmp_path: Path, config: dict[str, Any], named: str
) -> None:
    model = tiny_model("llama")
    write_checkpoint(tmp_path, model, {}, config)
    with pytest.raises(UnsupportedModelError, match=named):
        load_model(str(tmp_path))


def test_mxfp4_is_expanded(tmp_path: Path) -> None:
    """Experts in the format of gpt-oss, which transformers reads as bfloat16."""
    write_mxfp4(tmp_path, tiny_model("gpt_oss", hidden_size=64, intermediate_size=64))
    expected = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    wanted = expected.generate(torch.tensor([[1, 2, 3]]), max_new_tokens=8, do_sample=False)
    llm = LLM(str(tmp_path), device="cpu", num_blocks=16)
    params = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
    (found,) = llm.generate([[1, 2, 3]], params, use_tqdm=False)
    assert list(found.outputs[0].token_ids) == wanted[0, 3:].tolist()
    assert llm.stats().quantization is None


@pytest.mark.parametrize("layout", ["gptq sorted", "packed int4 sorted"])
def test_rows_are_sorted_once_for_all_that_share_an_order(layout: str, tmp_path: Path) -> None:
    """Queries, keys and values share an order, or keys and values only; so do gate and up. Each
    output has its own."""
    write_quantized(tmp_path, layout)
    loaded = load_model(str(tmp_path))
    captured = capture_model(loaded, probe_model(loaded), graph_cache=graph_cache())
    assert captured.graph is not None
    nodes = captured.graph.graph.nodes
    gathers = [node for node in nodes if node.target is torch.index_select]
    # One layer's last projection is not quantised in compressed-tensors' checkpoint.
    assert len(gathers) == (8 if layout == "gptq sorted" else 9)
    assert {len(node.users) for node in gathers} == {1}


def test_inputs_that_carry_no_groups_stay_in_their_order(tmp_path: Path) -> None:
    write_quantized(tmp_path, "gptq")
    _rewrite(tmp_path, "g_idx", lambda groups: torch.full_like(groups, -1))
    assert {type(weight) for weight in load_model(str(tmp_path)).quantized.values()} == {Int4Weight}


def test_groups_of_several_sizes_are_refused(tmp_path: Path) -> None:
    write_quantized(tmp_path, "gptq")
    _rewrite(tmp_path, "g_idx", lambda groups: groups.clamp(max=1))
    with pytest.raises(InvalidInputError, match="g_idx must put 128 inputs into each of") as caught:
        load_model(str(tmp_path))
    assert "layers.0.mlp.down_proj" in str(caught.value)


@pytest.mark.parametrize(
    ("layout", "part", "change", "named"),
    [
        ("fp8 blocks", "weight_scale_inv", lambda t: t[:1, :1], "not of shape"),
        ("fp8 blocks", "weight_scale_inv", lambda t: t * torch.inf, "NaN or infinity"),
        ("fp8 blocks", "weight", lambda t: (t.float() * torch.nan).to(t.dtype), "weight has NaN"),
        ("fp8 blocks", "weight", lambda t: t.float(), "weight is float32"),
        ("fp8 channels", "weight_scale", lambda t: t[:3], "3 elements"),
        ("awq", "scales", lambda t: t.repeat(16, 1), "a multiple of 32"),
        ("packed int4", "weight_packed", lambda t: t[:, 1:], "weight_packed is int32"),
    ],
)
def test_tensors_of_another_form_are_refused(
    tmp_path: Path, layout: str, part: str, change: Callable[[Tensor], Tensor], named: str
) -> None:
    write_quantized(tmp_path, layout)
    _rewrite(tmp_path, part, change)
    with pytest.raises(InvalidInputError, match=named):
        load_model(str(tmp_path))


def test_ignored_layers_are_not_quantised(tmp_path: Path) -> None:
    """The config's list and the tensors must agree."""
    write_quantized(tmp_path, "fp8 blocks")
    path = tmp_path / "config.json"
    config = json.loads(path.read_text())
    config["quantization_config"]["modules_to_not_convert"].append("mlp.gate_proj")
    path.write_text(json.dumps(config))
    with pytest.raises(InvalidInputError, match="says it is not quantised") as caught:
        load_model(str(tmp_path))
    assert "gate_proj" in str(caught.value)


def test_tensors_that_nothing_would_heed_are_refused(tmp_path: Path) -> None:
    model = tiny_model("llama", **SIZES)
    layer = "model.layers.0.mlp.up_proj"
    parts, _ = fp8_blocks(model.get_parameter(f"{layer}.weight").detach())
    plain = {name: p.detach().clone() for name, p in model.named_parameters()}
    quantized = plain | {f"{layer}.{end}": part for end, part in parts.items()}
    rows, _ = fp8_rows(model.get_parameter(f"{layer}.weight").detach())
    for tensors, named in (
        (quantized | {f"{layer}.input_scale": torch.ones(1)}, "input_scale is not known"),
        (quantized | {f"{layer}.bias": torch.ones(320)}, "has a bias"),
        (quantized | {"lm_head.weight": rows["weight"]}, "lm_head.weight"),
        (quantized | {"model.experts.weight_scale_inv": torch.ones(1)}, "no linear layer"),
        (plain, "has no weight_scale_inv at all"),
    ):
        write_checkpoint(tmp_path, model, tensors, FP8_CONFIG)
        with pytest.raises((InvalidInputError, UnsupportedModelError), match=named):
            load_model(str(tmp_path))


@pytest.mark.parametrize(
    ("settings", "field", "named"),
    [
        ({"dtype": "bfloat16"}, "dtype", "'fp8' need dtype float32, or auto, on a CPU"),
        ({"compile": "eager"}, "compile", "needs float weights"),
        ({"quantization": "gguf"}, "quantization", "needs a .gguf file"),
    ],
)
def test_settings_that_do_not_suit(
    tmp_path: Path, settings: dict[str, Any], field: str, named: str
) -> None:
    write_quantized(tmp_path, "fp8 blocks")
    with pytest.raises(InvalidInputError, match=named) as caught:
        LLM(str(tmp_path), **{"device": "cpu", "num_blocks": 4, **settings})
    assert caught.value.field == field


def test_refused_on_a_gpu_by_name(
    tmp_path: Path, cuda_capability: Callable[[tuple[int, int]], None]
) -> None:
    """On GPUs on which the kernels were not tested."""
    cuda_capability((8, 0))
    for layout, named in (
        ("gptq", "weights in int4 are served on GPUs of sm90; this one is sm80"),
        ("fp8 blocks", "weights in fp8 are served on GPUs of sm90; this one is sm80"),
    ):
        write_quantized(tmp_path, layout)
        with pytest.raises(InvalidInputError, match=named) as caught:
            load_model(str(tmp_path), device="cuda")
        assert caught.value.field == "device"


def test_refused_for_several_ranks(tmp_path: Path) -> None:
    write_quantized(tmp_path, "fp8 blocks")
    with pytest.raises(InvalidInputError, match="are for one process") as caught:
        load_model(str(tmp_path), shard=Shard(0, 2))
    assert caught.value.field == "tensor_parallel_size"


def test_quantising_what_is_quantised_is_refused(tmp_path: Path) -> None:
    write_quantized(tmp_path, "fp8 channels")
    with pytest.raises(InvalidInputError, match="already, by 'compressed-tensors'"):
        load_model(str(tmp_path), quantization="fp8")
    model = tiny_model("llama")
    with pytest.raises(InvalidInputError, match="a module in memory"):
        load_model(model, quantization="fp8")
    write_checkpoint(tmp_path, tiny_model("gpt2"), {}, None)
    with pytest.raises(InvalidInputError, match="has no weight at all"):
        load_model(str(tmp_path), quantization="fp8")


@pytest.mark.parametrize("name", ["fp8", "awq"])
def test_the_values_of_the_setting(tmp_path: Path, name: str) -> None:
    folder = save_word_model(tmp_path)
    if name == "fp8":
        assert LLM(folder, device="cpu", quantization=name, num_blocks=4).stats().quantization
        return
    with pytest.raises(InvalidInputError, match="must be one of gguf, fp8"):
        LLM(folder, device="cpu", quantization=name)


def _rewrite(folder: Path, part: str, change: Callable[[Tensor], Tensor]) -> None:
    """Change one part of every quantised layer."""
    from safetensors.torch import load_file, save_file

    path = folder / "model.safetensors"
    tensors = load_file(path)
    for name, tensor in tensors.items():
        if name.endswith(f"proj.{part}") and name.removesuffix(f".{part}") not in LEFT:
            tensors[name] = change(tensor).contiguous()
    save_file(tensors, path, {"format": "pt"})
