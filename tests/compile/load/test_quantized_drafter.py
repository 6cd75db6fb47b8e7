"""Drafters whose weights are quantised to FP8 at load, with their heads."""

from __future__ import annotations

import importlib.util
import logging
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from pagespec import LLM, InvalidInputError, SamplingParams
from pagespec.compile.load import quantized_drafter
from pagespec.compile.load.drafters import load_drafter, target_aux_layers
from pagespec.compile.load.load import load_model
from pagespec.compile.load.quantized_drafter import QUANTIZATION_KEY
from pagespec.compile.model.loaded import LoadedDrafter, LoadedModel
from pagespec.compile.weights import is_stand_in
from pagespec.engine.config import EngineConfig
from pagespec.engine.drafting.costs import StepCosts
from pagespec.kernels.matmul.quantized.quantized_weight import quantize_fp8
from pagespec.runner import weight_budget
from pagespec.runner.cpu import platform as cpu_platform
from tests.compile.load.gguf_models import write_whole
from tests.support.captures import use_gpu_passes
from tests.support.draft_files import (
    eagle3_config,
    eagle3_tensors,
    edit_config,
    quantize_files,
    save_eagle3,
    save_with_mtp,
)
from tests.support.drafting import Drafting
from tests.support.models import VOCAB_SIZE, tiny_model
from tests.support.quantized_files import write_quantized

IDS = [(7 * i + 3) % VOCAB_SIZE for i in range(40)]
KINDS = ("draft_model", "mtp", "eagle3")
HEADS = {"draft_model": "lm_head", "mtp": "shared_head", "eagle3": "lm_head"}


def saved(kind: str, folder: Path) -> tuple[Path, str | None]:
    """The folders of a target and of its drafter."""
    if kind == "mtp":
        save_with_mtp(folder / "target", "qwen3_5_text")
        return folder / "target", None
    main = tiny_model("llama", num_hidden_layers=4)
    main.save_pretrained(folder / "target")
    if kind == "draft_model":
        tiny_model("llama", seed=1, num_hidden_layers=1).save_pretrained(folder / "drafter")
    else:
        config = eagle3_config(main, 96) | {"eagle_aux_hidden_state_layer_ids": [0, 2, 4]}
        save_eagle3(folder / "drafter", config, eagle3_tensors(main, 96))
    return folder / "target", str(folder / "drafter")


def loaded_target(kind: str, folder: Path, drafter: str | None, **options: Any) -> LoadedModel:
    target = load_model(folder, **options)
    return replace(target, aux_layers=target_aux_layers(kind, drafter, target))


def hidden_states(target: LoadedModel, drafter: LoadedDrafter) -> torch.Tensor | None:
    if drafter.kind == "draft_model":
        return None
    size = target.config.get_text_config(decoder=True).hidden_size
    generator = torch.Generator().manual_seed(0)
    return torch.randn(len(IDS), size * (len(drafter.target_layers) or 1), generator=generator)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("load_format", ["auto", "dummy"])
def test_linear_layers_and_the_head_become_fp8(kind: str, load_format: str, tmp_path: Path) -> None:
    target = loaded_target(kind, *saved(kind, tmp_path), load_format=load_format)
    model = None if kind == "mtp" else str(tmp_path / "drafter")
    plain = load_drafter(kind, model, target, load_format=load_format)
    before = {n: t.clone() for n, t in target.module.state_dict().items()}
    drafter = load_drafter(kind, model, target, load_format=load_format, quantization="fp8")
    linears = {
        f"{n}.weight": m.weight
        for n, m in plain.loaded.module.named_modules()
        if isinstance(m, nn.Linear)
    }
    assert f"{HEADS[kind]}.weight" in linears
    assert drafter.loaded.quantized.keys() == linears.keys()
    for name, weight in linears.items():
        held = drafter.loaded.quantized[name]
        assert held is not None
        assert held.equals(quantize_fp8(weight)), name
    parameters = dict(drafter.loaded.module.named_parameters())
    assert {name for name, p in parameters.items() if is_stand_in(p)} == linears.keys()
    # The target shares no part that has changed.
    assert target.module.state_dict().keys() == before.keys()
    for name, tensor in target.module.state_dict().items():
        assert torch.equal(tensor, before[name]), name

    hidden = hidden_states(target, drafter)
    expected = Drafting(plain)(IDS, hidden).logits
    drafting = Drafting(drafter)
    logits = drafting(IDS, hidden).logits
    count = sum(weight.numel() for weight in linears.values())
    assert drafting.captured.captured.weight_formats["fp8"] == count
    is_drafted = expected.isfinite()
    assert torch.equal(logits.isfinite(), is_drafted)
    difference = (logits - expected)[is_drafted].abs().max()
    assert 1e-4 < float(difference / expected[is_drafted].abs().max()) < 0.3


def test_a_head_that_is_an_embedding_becomes_a_copy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(quantized_drafter, "_ROWS_AT_ONCE", 128)  # VOCAB_SIZE is larger
    model = tiny_model("llama", tie_word_embeddings=True, vocab_size=300)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    model.save_pretrained(tmp_path)
    target = load_model(tmp_path)
    drafter = load_drafter("draft_model", str(tmp_path), target, quantization="fp8")
    module: Any = drafter.loaded.module
    assert torch.equal(module.model.embed_tokens.weight, model.model.embed_tokens.weight)
    assert is_stand_in(module.lm_head.weight)
    held = drafter.loaded.quantized["lm_head.weight"]
    assert held is not None
    assert held.equals(quantize_fp8(model.lm_head.weight))
    assert Drafting(drafter)(IDS).logits.isfinite().all()


@pytest.mark.parametrize("kind", KINDS)
def test_a_drafter_in_fp8_gets_only_a_head(kind: str, tmp_path: Path) -> None:
    folder, model = saved(kind, tmp_path)
    excluded = "mtp.layers.0.mlp.up_proj" if kind == "mtp" else "model.layers.0.mlp.up_proj"
    excluded = "midlayer.mlp.up_proj" if kind == "eagle3" else excluded
    quantize_files(Path(model or folder), [excluded])
    target = loaded_target(kind, folder, model)
    plain = load_drafter(kind, model, target).loaded
    drafter = load_drafter(kind, model, target, quantization="fp8").loaded
    head = f"{HEADS[kind]}.weight"
    assert drafter.quantized.keys() == {*plain.quantized, head}
    assert not any("up_proj" in name for name in drafter.quantized)
    assert drafter.quantization == plain.quantization
    assert head not in plain.quantized


@pytest.mark.usefixtures("_free")
@pytest.mark.parametrize("kind", KINDS)
def test_answers_do_not_depend_on_it(
    kind: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder, model = saved(kind, tmp_path)
    settings: dict[str, Any] = {"block_size": 4, "num_blocks": 90, "max_model_len": 64}
    config = {"method": kind, "quantization": "fp8"} | ({} if model is None else {"model": model})
    if kind == "draft_model":
        config["model"] = str(folder)
    prompts = [[(7 * i * i + j) % VOCAB_SIZE for i in range(20)] for j in range(3)]
    params = [SamplingParams(max_tokens=14, temperature=t, seed=1, logprobs=1) for t in (0, 0.8, 0)]

    def answers(llm: LLM) -> list[Any]:
        found = llm.generate([{"prompt_token_ids": p} for p in prompts], params, use_tqdm=False)
        return [(o.outputs[0].token_ids, o.outputs[0].logprobs) for o in found]

    plain = answers(LLM(folder, threads=1, **settings))
    caplog.set_level(logging.INFO, "pagespec")
    llm = LLM(folder, threads=1, speculative_config=config, **settings)
    assert "drafter: " in caplog.text
    assert "M in fp8" in caplog.text
    assert llm.stats().quantization is None  # the target's
    assert answers(llm) == plain
    stats = llm.stats()
    assert stats.num_draft_tokens > 20
    if kind == "draft_model":
        assert stats.num_accepted_tokens / stats.num_draft_tokens > 0.3


@pytest.mark.skipif(
    importlib.util.find_spec("triton") is None or os.environ.get("TRITON_INTERPRET") != "1",
    reason="needs Triton's interpreter",
)
@pytest.mark.parametrize("kind", KINDS)
def test_kernels_of_a_gpu_compute_layers_and_head(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from pagespec.kernels.matmul.quantized import dispatch_fp8

    target = loaded_target(kind, *saved(kind, tmp_path))
    model = None if kind == "mtp" else str(tmp_path / "drafter")
    hidden = hidden_states(target, plain := load_drafter(kind, model, target))
    expected = Drafting(plain)(IDS, hidden).logits
    use_gpu_passes(monkeypatch, has_sweeps=True)
    drafting = Drafting(load_drafter(kind, model, target, quantization="fp8"))
    graph = drafting.captured.captured.graph
    assert graph is not None
    calls = graph.graph.find_nodes(op="call_function", target=dispatch_fp8.linear)
    assert sum("head" in str(call.args[1]) for call in calls) == 1
    logits = drafting(IDS, hidden).logits
    is_drafted = expected.isfinite()
    difference = (logits - expected)[is_drafted].abs().max()
    assert 1e-4 < float(difference / expected[is_drafted].abs().max()) < 0.4


@pytest.fixture
def _free(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_platform, "_packing_bytes", lambda **_: 0)
    monkeypatch.setattr(cpu_platform, "measure_costs", lambda *_: StepCosts([(1, 1.0), (99, 1.0)]))


# What is refused ----------------------------------------------------------------------------------


def started(folder: Path, drafts: dict[str, Any], **settings: Any) -> LLM:
    drafts = {"quantization": "fp8", **drafts}
    settings = {"num_blocks": 16, "max_model_len": 64} | settings
    return LLM(folder, speculative_config=drafts, **settings)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"dtype": "bfloat16", "device": "cpu"}, "needs dtype float32, or auto; dtype is 'bfloat"),
        ({"compile": "eager"}, "needs a captured graph, not compile eager"),
    ],
)
def test_settings_are_refused_as_with_a_quantised_target(
    kind: str, settings: dict[str, Any], message: str
) -> None:
    drafts = {"method": kind} | ({} if kind == "mtp" else {"model": "m"})
    for field, given in (
        ("quantization", {"quantization": "fp8"}),
        (QUANTIZATION_KEY, {"speculative_config": {**drafts, "quantization": "fp8"}}),
    ):
        with pytest.raises(InvalidInputError, match=message) as caught:
            EngineConfig(**given, **settings)
        assert (caught.value.field, caught.value.value) == (field, "fp8")


@pytest.mark.parametrize("kind", KINDS)
def test_a_dtype_is_refused_that_a_cpu_does_not_support(kind: str, tmp_path: Path) -> None:
    folder, model = saved(kind, tmp_path)
    message = "weights quantised by 'fp8' need dtype float32, or auto, on a CPU"
    with pytest.raises(InvalidInputError, match=message) as caught:
        started(
            folder, {"method": kind} | ({} if model is None else {"model": model}), dtype="bfloat16"
        )
    assert caught.value.field == "dtype"


def test_a_drafter_quantised_by_another_method_is_refused(tmp_path: Path) -> None:
    folder, _ = saved("draft_model", tmp_path)
    write_quantized(tmp_path / "int4", "awq")
    with pytest.raises(InvalidInputError, match="are quantised already, by 'awq'") as caught:
        started(folder, {"method": "draft_model", "model": str(tmp_path / "int4")})
    assert caught.value.field == QUANTIZATION_KEY


def test_a_gguf_file_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PAGESPEC_CACHE", str(tmp_path / "cache"))
    write_whole(tmp_path / "tiny.gguf")
    target = load_model(tiny_model("llama"))
    with pytest.raises(InvalidInputError, match=r"must be absent for a \.gguf file") as caught:
        load_drafter("draft_model", str(tmp_path / "tiny.gguf"), target, quantization="fp8")
    assert (caught.value.field, caught.value.value) == ("quantization", "fp8")


def test_a_drafter_without_a_linear_head_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(quantized_drafter, "head_of", lambda _: "")
    folder, model = saved("draft_model", tmp_path)
    with pytest.raises(InvalidInputError, match="the head of LlamaForCausalLM is no linear") as err:
        started(folder, {"method": "draft_model", "model": model})
    assert err.value.field == QUANTIZATION_KEY


def test_a_weight_that_is_read_twice_is_refused_by_the_drafters_name(tmp_path: Path) -> None:
    """Jamba multiplies with the weight of ``dt_proj`` itself."""
    folder, _ = saved("draft_model", tmp_path)
    tiny_model("jamba").save_pretrained(tmp_path / "jamba")
    with pytest.raises(InvalidInputError, match="dt_proj by more than its linear") as caught:
        started(folder, {"method": "draft_model", "model": str(tmp_path / "jamba")})
    assert caught.value.field == QUANTIZATION_KEY


def test_a_head_of_the_target_that_is_quantised_is_refused(tmp_path: Path) -> None:
    folder, _ = saved("mtp", tmp_path)
    target = load_model(folder)
    head: Any = target.module.get_output_embeddings()
    head.weight.data = torch.full((1,), torch.nan).expand(head.weight.shape)
    with pytest.raises(InvalidInputError, match="which the drafter shares, is quantised already"):
        load_drafter("mtp", None, target, quantization="fp8")


def test_infinite_values_of_a_head_are_refused(tmp_path: Path) -> None:
    folder, _ = saved("mtp", tmp_path)
    target = load_model(folder)
    head: Any = target.module.get_output_embeddings()
    with torch.no_grad():
        head.weight[5, 7] = torch.inf
    with pytest.raises(InvalidInputError, match=r"shared_head.*weight has NaN or infinity"):
        load_drafter("mtp", None, target, quantization="fp8")


@pytest.mark.parametrize("quantization", [None, "fp8"])
def test_a_draft_model_that_does_not_fit_is_refused(
    quantization: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, model = saved("draft_model", tmp_path)
    edit_config(tmp_path / "drafter", torch_dtype="bfloat16")
    num_elements = sum(p.numel() for p in load_model(model or "").module.parameters())
    num_bytes = num_elements * (1 if quantization else 4)
    drafts = {"method": "draft_model", "model": model, "quantization": quantization}
    own = weight_budget.check_drafter_fits
    for free in (num_bytes, num_bytes - 1):

        def check(*given: Any, free: int = free) -> None:
            with monkeypatch.context() as patch:
                patch.setattr(weight_budget, "available_bytes", lambda: free)
                own(*given)

        monkeypatch.setattr(weight_budget, "check_drafter_fits", check)
        if free == num_bytes:
            started(folder, drafts, load_format="dummy")
            continue
        with pytest.raises(InvalidInputError, match=r"its weights take 0\.0 GiB in") as caught:
            started(folder, drafts, load_format="dummy")
        assert caught.value.field == "speculative_config.model"


def test_a_copy_of_a_head_that_does_not_fit_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, _ = saved("mtp", tmp_path)
    target = load_model(folder)
    config = started(folder, {"method": "mtp"}).config
    head: Any = target.module.get_output_embeddings()
    monkeypatch.setattr(weight_budget, "available_bytes", lambda: head.weight.numel())
    weight_budget.check_drafter_fits(config, target)
    monkeypatch.setattr(weight_budget, "available_bytes", lambda: head.weight.numel() - 1)
    with pytest.raises(InvalidInputError, match="the drafter's copy of the head takes") as caught:
        weight_budget.check_drafter_fits(config, target)
    assert caught.value.field == QUANTIZATION_KEY
