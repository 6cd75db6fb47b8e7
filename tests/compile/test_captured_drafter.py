"""Drafters with a model: what they load and compute, and what is refused."""

from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedTokenizerFast

from pagespec import InvalidInputError
from pagespec.build import build, make_drafter_model
from pagespec.compile.captured_drafter import capture_drafter, on_target_ids
from pagespec.compile.captured_model import CaptureOptions, capture_model
from pagespec.compile.load.drafters import load_drafter
from pagespec.compile.load.load import load_model
from pagespec.compile.model.loaded import WHOLE, LoadedDrafter, LoadedModel, Shard
from pagespec.compile.passes.split_head import keep_rows, without_head
from pagespec.compile.probe.probe import probe_model
from pagespec.engine.config import EngineConfig
from pagespec.runner.platform import find_platform
from tests.compile.fx.test_spec import JOINING
from tests.support.captures import graph_cache, use_gpu_passes
from tests.support.draft_files import (
    eagle3_config,
    eagle3_tensors,
    edit_config,
    quantize_files,
    save_eagle3,
    save_with_mtp,
)
from tests.support.drafting import BLOCK_SIZE, NUM_BLOCKS, Drafting, step
from tests.support.models import VOCAB_SIZE, save_word_model, tiny_model

IDS = [(7 * i + 3) % VOCAB_SIZE for i in range(40)]


@pytest.fixture(scope="module")
def target() -> LoadedModel:
    return load_model(tiny_model("llama"))


def draft_model(folder: Path, target: LoadedModel, **options: Any) -> LoadedDrafter:
    return load_drafter("draft_model", str(folder), target, **options)


def saved(folder: Path, arch: str = "llama", **overrides: Any) -> Any:
    model = tiny_model(arch, seed=1, **overrides)
    model.save_pretrained(folder)
    return model


def test_a_draft_model_computes_its_own_logits(tmp_path: Path, target: LoadedModel) -> None:
    model = saved(tmp_path, num_hidden_layers=1)
    drafting = Drafting(draft_model(tmp_path, target))
    expected = model(torch.tensor([IDS])).logits[0]
    first, second = drafting(IDS[:30]), drafting(IDS[30:], begin=30)
    assert first.hidden is None
    assert not drafting.captured.needs_hidden
    torch.testing.assert_close(torch.cat([first.logits, second.logits]), expected)


def test_its_kv_has_a_tensor_per_attention_call(tmp_path: Path, target: LoadedModel) -> None:
    model = saved(tmp_path, num_hidden_layers=1)
    captured = Drafting(draft_model(tmp_path, target)).captured
    ((keys, values),) = captured.allocate_kv(NUM_BLOCKS, BLOCK_SIZE)
    assert keys.shape[:2] == values.shape[:2] == (NUM_BLOCKS + 1, BLOCK_SIZE)
    assert keys.shape[2] == model.config.num_key_value_heads
    num_bytes = (keys.nbytes + values.nbytes) // (NUM_BLOCKS + 1)
    assert captured.bytes_per_block(BLOCK_SIZE) == num_bytes
    fp8 = replace(captured, kv_cache_dtype="fp8")
    assert fp8.allocate_kv(1, BLOCK_SIZE)[0][0].dtype == torch.uint8
    assert fp8.bytes_per_block(BLOCK_SIZE) < num_bytes


@pytest.mark.parametrize("compile", ["graph", "eager"])
def test_kv_is_also_computed_without_logits(
    tmp_path: Path, target: LoadedModel, compile: str
) -> None:
    saved(tmp_path, num_hidden_layers=2)
    captured = Drafting(draft_model(tmp_path, target), compile).captured
    whole, filled = (captured.allocate_kv(NUM_BLOCKS, BLOCK_SIZE) for _ in range(2))
    with torch.inference_mode():
        captured.bind(whole)(step(IDS, 0), None)
        captured.bind_fill(filled)(step(IDS, 0), None)
    for caches in zip(whole, filled, strict=True):
        for a, b in zip(*caches, strict=True):
            assert torch.equal(a[:NUM_BLOCKS], b[:NUM_BLOCKS])
            assert a.any()
    if compile == "graph":
        graph = captured.captured.graph
        assert graph is not None
        kept = [n.target for n in without_head(graph).__self__.graph.nodes]  # type: ignore[attr-defined]
        assert keep_rows not in kept
        assert keep_rows in [n.target for n in graph.graph.nodes]


def test_logits_have_the_ids_of_the_target() -> None:
    logits = torch.tensor([[1.0, 2.0, 3.0]])
    none = float("-inf")
    assert on_target_ids(logits, None, 3) is not None
    assert on_target_ids(logits, None, 2).tolist() == [[1.0, 2.0]]
    assert on_target_ids(logits, None, 5).tolist() == [[1.0, 2.0, 3.0, none, none]]
    ids = torch.tensor([4, 0, 2])
    assert on_target_ids(logits, ids, 5).tolist() == [[2.0, none, 3.0, none, 1.0]]


def test_heads_of_different_sizes_are_accepted_with_one_tokenizer(tmp_path: Path) -> None:
    save_word_model(tmp_path / "target")
    model = saved(tmp_path / "small", vocab_size=VOCAB_SIZE - 2, num_hidden_layers=1)
    PreTrainedTokenizerFast.from_pretrained(tmp_path / "target").save_pretrained(tmp_path / "small")
    target = load_model(tmp_path / "target")
    drafting = Drafting(draft_model(tmp_path / "small", target, max_model_len=64))
    logits = drafting([1, 2, VOCAB_SIZE - 1]).logits  # the last one is beyond the small model's ids
    assert logits.shape == (3, VOCAB_SIZE)
    assert logits[:, -2:].isneginf().all()
    expected = model(torch.tensor([[1, 2]])).logits[0]
    torch.testing.assert_close(logits[:2, :-2], expected)


def test_other_tokens_are_refused(tmp_path: Path, target: LoadedModel) -> None:
    saved(tmp_path / "other", vocab_size=VOCAB_SIZE + 8)
    with pytest.raises(InvalidInputError, match=r"speculative_config.model = .* must have the "):
        draft_model(tmp_path / "other", target)
    save_word_model(tmp_path / "words")
    words = load_model(tmp_path / "words")
    changed = copy.deepcopy(words.tokenizer)
    changed.add_tokens(["one-more"])
    with pytest.raises(InvalidInputError, match="must have the target's tokenizer"):
        draft_model(tmp_path / "words", replace(words, tokenizer=changed))


def test_what_does_not_serve_the_target_is_refused(tmp_path: Path, target: LoadedModel) -> None:
    saved(tmp_path / "short", max_position_embeddings=64)
    with pytest.raises(InvalidInputError, match="must support max_model_len = 100 tokens, not 64"):
        draft_model(tmp_path / "short", target, max_model_len=100)
    of_rank = replace(target, shard=Shard(0, 2))
    assert draft_model(tmp_path / "short", of_rank, max_model_len=64).loaded.shard == WHOLE
    saved(tmp_path / "states", "qwen3_5_text")
    loaded = draft_model(tmp_path / "states", target, max_model_len=64)
    with pytest.raises(InvalidInputError, match="must have attention only"):
        Drafting(loaded)
    with pytest.raises(InvalidInputError):
        draft_model(tmp_path / "missing", target)


# MTP and EAGLE-3 ----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def deep() -> LoadedModel:
    """A target with layers for EAGLE-3, which reads three of them."""
    return replace(load_model(tiny_model("llama", num_hidden_layers=4)), aux_layers=(0, 2, 4))


def eagle3(folder: Path, target: LoadedModel, *without: str, **fields: Any) -> LoadedDrafter:
    """A drafter of 96 tokens with a changed config, without some tensors."""
    ids = {"eagle_aux_hidden_state_layer_ids": [0, 2, 4]}
    config: Any = eagle3_config(target.module, 96) | {"eagle_config": ids} | fields
    tensors = eagle3_tensors(target.module, 96)
    save_eagle3(folder, config, {n: t for n, t in tensors.items() if n not in without})
    return load_drafter("eagle3", str(folder), target)


def near(one: torch.Tensor, other: torch.Tensor) -> float:
    """The largest difference, relative to the largest finite value."""
    is_finite = other.isfinite()
    return float((one - other)[is_finite].abs().max() / other[is_finite].abs().max())


def test_quantised_layers_of_a_drafter_stay_quantised(tmp_path: Path, deep: LoadedModel) -> None:
    save_with_mtp(tmp_path / "mtp", "qwen3_5_text")
    hidden = torch.randn(len(IDS), 48)
    mtp = load_drafter("mtp", None, load_model(tmp_path / "mtp"))
    plain = Drafting(mtp)(IDS, hidden)
    quantize_files(tmp_path / "mtp", ["mtp.layers.0.mlp.up_proj"])
    target = load_model(tmp_path / "mtp")
    drafter = load_drafter("mtp", None, target)
    assert "layers.0.mtp_block.self_attn.q_proj.weight" in drafter.loaded.quantized
    assert "layers.0.mtp_block.mlp.up_proj.weight" not in drafter.loaded.quantized
    drafting = Drafting(drafter)
    assert drafting.captured.captured.weight_formats["fp8"] > 0
    assert 1e-4 < near(drafting(IDS, hidden).logits, plain.logits) < 0.2

    plain = Drafting(eagle3(tmp_path / "eagle3", deep))(IDS, hidden[:, :32])
    quantize_files(tmp_path / "eagle3", ["midlayer.mlp.up_proj"])
    drafter = load_drafter("eagle3", str(tmp_path / "eagle3"), deep)
    assert sorted(drafter.loaded.quantized) == [
        f"layers.0.{name}.weight"
        for name in (
            *("mlp.down_proj", "mlp.gate_proj"),
            *(f"self_attn.{x}_proj" for x in "koqv"),
        )
    ]
    assert 1e-4 < near(Drafting(drafter)(IDS, hidden[:, :32]).logits, plain.logits) < 0.2


def test_a_target_quantised_at_load_has_such_an_mtp_layer(tmp_path: Path) -> None:
    save_with_mtp(tmp_path, "qwen3_5_text")
    drafter = load_drafter("mtp", None, load_model(tmp_path, quantization="fp8"))
    assert drafter.loaded.is_quantized_at_load
    drafting = Drafting(drafter)
    assert drafting.captured.captured.weight_formats["fp8"] > 0
    assert drafting(IDS, torch.randn(len(IDS), 48)).logits.isfinite().all()


def test_parts_that_a_drafter_lacks_are_those_of_the_target(
    tmp_path: Path, target: LoadedModel
) -> None:
    target = replace(target, aux_layers=(0, 1, 2))
    model: Any = target.module
    sizes = {"hidden_size": 48, "draft_vocab_size": VOCAB_SIZE, "head_dim": 12}
    config = eagle3_config(model, 96) | sizes
    config["eagle_aux_hidden_state_layer_ids"] = [0, 1, 2]
    tensors = {
        name: torch.randn([48 if n == 32 else 96 if n == 64 else n for n in tensor.shape])
        for name, tensor in eagle3_tensors(model, 96).items()
        if name not in ("embed_tokens.weight", "lm_head.weight", "d2t", "t2d")
    }
    for name in ("q", "k", "v"):
        part = f"midlayer.self_attn.{name}_proj.weight"
        tensors[part] = torch.randn(48 if name == "q" else 24, 96)
    tensors["midlayer.self_attn.o_proj.weight"] = torch.randn(48, 48)
    save_eagle3(tmp_path, config, tensors)
    drafter = load_drafter("eagle3", str(tmp_path), target)
    module: Any = drafter.loaded.module
    assert module.embed_tokens is model.get_input_embeddings()
    assert module.lm_head is model.get_output_embeddings()
    assert drafter.token_ids is None
    assert Drafting(drafter)(IDS, torch.randn(len(IDS), 144)).logits.shape[1] == VOCAB_SIZE


def test_random_weights_need_only_configs(tmp_path: Path, deep: LoadedModel) -> None:
    save_with_mtp(tmp_path / "mtp", "glm4_moe")
    (tmp_path / "mtp" / "model.safetensors").unlink()
    target = load_model(tmp_path / "mtp", load_format="dummy")
    embedding = target.module.get_input_embeddings().weight.clone()
    mtp = Drafting(load_drafter("mtp", None, target, load_format="dummy"))
    assert mtp(IDS, torch.randn(len(IDS), 48)).logits.std() > 0
    assert torch.equal(target.module.get_input_embeddings().weight, embedding)
    eagle3(tmp_path / "eagle3", deep)
    (tmp_path / "eagle3" / "model.safetensors").unlink()
    drafter = load_drafter("eagle3", str(tmp_path / "eagle3"), deep, load_format="dummy")
    logits = Drafting(drafter)(IDS, torch.randn(len(IDS), 144)).logits
    assert int(logits[0].isfinite().sum()) == 96


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"use_aux_hidden_state": False}, "use_aux_hidden_state = false is unsupported"),
        ({"eagle_aux_hidden_state_layer_ids": [1, 2, 9]}, "reads the target's layers .*has 4"),
        ({"eagle_aux_hidden_state_layer_ids": [1, 2]}, "reads 144 hidden values per token, not 96"),
        ({"eagle_aux_hidden_state_layer_ids": ["1"]}, "must have the config.json of an EAGLE-3"),
        ({"model_type": "no-such"}, "must have the config.json of an EAGLE-3"),
        ({"draft_vocab_size": 95}, "must have all weights; 1 have other shapes"),
        ({"hidden_size": 40}, "must have all weights"),
    ],
)
def test_a_config_that_does_not_fit_is_refused(
    change: dict[str, Any], message: str, tmp_path: Path, deep: LoadedModel
) -> None:
    with pytest.raises(InvalidInputError, match=message):
        eagle3(tmp_path, deep, **change)


def test_tensors_that_do_not_fit_are_refused(tmp_path: Path, deep: LoadedModel) -> None:
    with pytest.raises(InvalidInputError, match="must have all weights; 1 are missing"):
        eagle3(tmp_path / "a", deep, "midlayer.hidden_norm.weight")
    with pytest.raises(InvalidInputError, match="must have the weights of an EAGLE-3"):
        eagle3(tmp_path / "b", deep, "fc.weight")
    with pytest.raises(InvalidInputError, match="needs d2t: it has 96 tokens"):
        eagle3(tmp_path / "c", deep, "d2t")
    for number, offsets in enumerate(([0] * 95, [-1] * 96, [0] * 95 + [-1], [400] * 96)):
        folder = tmp_path / f"d{number}"
        eagle3(folder, deep)
        with (folder / "model.safetensors").open("rb"):
            save_eagle3(folder, eagle3_config(deep.module, 96), {"d2t": torch.tensor(offsets)})
        edit_config(folder, eagle_aux_hidden_state_layer_ids=[0, 2, 4])
        with pytest.raises(InvalidInputError, match="must have in d2t an own token"):
            load_drafter("eagle3", str(folder), deep)


def test_a_target_without_an_mtp_layer_is_refused(tmp_path: Path, target: LoadedModel) -> None:
    with pytest.raises(InvalidInputError, match="'mtp': needs a model with a multi-token"):
        load_drafter("mtp", None, target)
    main, _ = save_with_mtp(tmp_path / "mtp", "deepseek_v3")
    with pytest.raises(InvalidInputError, match="needs a model in files, not in memory"):
        load_drafter("mtp", None, load_model(main))
    tiny_model("deepseek_v3").save_pretrained(tmp_path / "plain")
    with pytest.raises(InvalidInputError, match="the files have no tensors of one"):
        load_drafter("mtp", None, load_model(tmp_path / "plain"))


# Engines ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["draft_model", "mtp", "eagle3"])
def test_an_engine_has_the_drafter_of_its_config(kind: str, tmp_path: Path) -> None:
    main, _ = save_with_mtp(tmp_path / "target", "glm4_moe")
    given: dict[str, Any] = {"method": kind}
    if kind == "draft_model":
        saved(tmp_path / "other", num_hidden_layers=1, vocab_size=main.config.vocab_size)
        given["model"] = tmp_path / "other"
    elif kind == "eagle3":
        config = eagle3_config(main, 96) | {"eagle_aux_hidden_state_layer_ids": [0, 1, 2]}
        save_eagle3(tmp_path / "other", config, eagle3_tensors(main, 96))
        given["model"] = str(tmp_path / "other")
    config = EngineConfig(
        speculative_config=given, num_blocks=16, max_model_len=64, kv_cache_dtype="fp8"
    )
    for _ in range(2):  # the second start finds stored graphs
        built = build(str(tmp_path / "target"), config)
        captured: Any = built.runner.captured  # type: ignore[attr-defined]
        drafter = make_drafter_model(config, find_platform(config, WHOLE), captured)
    assert captured.num_captures == drafter.captured.num_captures == 0
    assert captured.loaded.aux_layers == drafter.drafter.target_layers
    assert captured.loaded.aux_layers == ((0, 1, 2) if kind == "eagle3" else ())
    assert (drafter.kind, drafter.needs_hidden) == (kind, kind != "draft_model")
    assert drafter.allocate_kv(2, 16)[0][0].dtype == torch.uint8


@pytest.mark.parametrize("kind", ["deepseek_v3", "qwen3_5_text", "eagle3"])
def test_passes_for_a_gpu_find_their_patterns(
    kind: str, tmp_path: Path, deep: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PAGESPEC_CHECK_GRAPH", "1")
    use_gpu_passes(monkeypatch, has_sweeps=True)
    if kind == "eagle3":
        target = replace(
            load_model(tiny_model("llama", num_hidden_layers=4).bfloat16()), aux_layers=(0, 2, 4)
        )
        drafter = eagle3(tmp_path, target)
    else:
        save_with_mtp(tmp_path, kind)
        target = load_model(tmp_path, dtype="bfloat16")
        drafter = load_drafter("mtp", None, target)
    options = CaptureOptions(transparent=False, attention=JOINING)
    captured = capture_drafter(
        drafter, options=lambda _: options, graph_cache=graph_cache()
    ).captured
    models = [captured]
    if not target.recurrent and kind == "eagle3":
        specs = probe_model(target)
        models.append(capture_model(target, specs, options, graph_cache=graph_cache()))
    for model in models:
        assert model.graph is not None
        (results,) = model.graph.graph.find_nodes(op="output")[0].args
        assert len(results) == 2 + bool(model.loaded.aux_layers)
        assert model.head is not None
        assert model.rewrites["fuse_rope_attention"] > 0 or model.specs[0].is_latent
        assert model.rewrites["fuse_norm"] > 0
