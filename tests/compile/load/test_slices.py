"""Slices that are read or drawn are those of the whole model, and nothing more is allocated."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

from pagespec.compile.load import slices, weight_names
from pagespec.compile.load.initial_values import InitialValues, KeptConstants
from pagespec.compile.load.load import load_model
from pagespec.compile.load.tensor_parallel import shard_model
from pagespec.compile.model.loaded import LoadedModel, Shard, named_tensors
from pagespec.compile.weights import Cut
from pagespec.errors import InvalidInputError
from tests.support.models import BY_DAY, TP_OVERRIDES, WITHOUT_PLAN, tiny_model

CPU = torch.device("cpu")
ONE_BLOCK = 1 << 22  # bytes of integers and quantiles while elements are drawn
BY_DAY_WITH_PLAN = [param for param in BY_DAY if param.values[0] not in WITHOUT_PLAN]


def write(folder: Path, arch: str, **overrides: Any) -> str:
    tiny_model(arch, **{**TP_OVERRIDES.get(arch, {}), **overrides}).save_pretrained(folder)
    return str(folder)


def check_slices(folder: str, num_ranks: int, **options: Any) -> list[LoadedModel]:
    """Each rank's tensors are equal to the slices of a whole load."""
    parts = []
    for rank in range(num_ranks):
        shard = Shard(rank, num_ranks)
        part, whole = load_model(folder, shard=shard, **options), load_model(folder, **options)
        cuts: dict[str, Cut] = {}
        assert shard_model(whole.module, shard, cuts).sizes == part.vocab_sizes
        assert cuts
        assert cuts == part.cuts
        found, wanted = dict(named_tensors(part.module)), dict(named_tensors(whole.module))
        assert found.keys() == wanted.keys()
        for name, tensor in found.items():
            assert tensor.dtype == wanted[name].dtype, name
            assert torch.equal(tensor, wanted[name]), name
            assert isinstance(tensor, nn.Parameter) == isinstance(wanted[name], nn.Parameter)
        parts.append(part)
    return parts


@pytest.mark.parametrize("load_format", ["auto", "dummy"])
@pytest.mark.parametrize("arch", BY_DAY_WITH_PLAN)
def test_a_rank_has_the_slices_of_the_whole(arch: str, load_format: str, tmp_path: Path) -> None:
    folder = write(tmp_path, arch)
    for num_ranks, dtype in ((2, "bfloat16"), (4, "float32")):
        check_slices(folder, num_ranks, load_format=load_format, dtype=dtype)


@pytest.mark.parametrize("load_format", ["auto", "dummy"])
def test_a_tied_head_is_a_part_of_the_embedding(load_format: str, tmp_path: Path) -> None:
    folder = write(tmp_path, "qwen3", vocab_size=2048, tie_word_embeddings=True)
    for part in check_slices(folder, 2, load_format=load_format):
        head: Any = part.module.get_output_embeddings().weight
        embedding: Any = part.module.get_input_embeddings().weight
        assert part.vocab_sizes == [1024, 1024]
        assert head.untyped_storage().data_ptr() == embedding.untyped_storage().data_ptr()


@pytest.mark.parametrize("load_format", ["auto", "dummy"])
@pytest.mark.parametrize("is_tied", [False, True])
def test_a_head_that_is_kept_whole_has_the_values_of_all_ranks(
    is_tied: bool, load_format: str, tmp_path: Path
) -> None:
    folder = write(tmp_path, "qwen3", vocab_size=2048, tie_word_embeddings=is_tied)
    whole: Any = load_model(folder, load_format=load_format).module.get_output_embeddings()
    for rank in range(2):
        shard = Shard(rank, 2)
        part = load_model(folder, load_format=load_format, shard=shard, keeps_head=True)
        own: Any = part.module.get_output_embeddings()
        assert torch.equal(part.head.weight, whole.weight)
        assert torch.equal(own.weight, whole.weight[1024 * rank : 1024 * (rank + 1)])
        storages = (head.weight.untyped_storage().data_ptr() for head in (own, part.head))
        assert len(set(storages)) == 1


def with_tensors(folder: str, change: Callable[[dict[str, Tensor]], Any]) -> str:
    file = Path(folder) / "model.safetensors"
    tensors = {name: tensor.clone() for name, tensor in load_file(file).items()}
    change(tensors)
    save_file(tensors, file, {"format": "pt"})
    return folder


def test_tied_parameters_of_different_values_are_separate(tmp_path: Path) -> None:
    """As transformers loads them."""
    folder = write(tmp_path, "llama", tie_word_embeddings=True)
    name = "model.embed_tokens.weight"
    with_tensors(folder, lambda tensors: tensors.update({"lm_head.weight": tensors[name] + 1}))
    [part, _] = check_slices(folder, 2)
    head, embedding = part.module.get_output_embeddings(), part.module.get_input_embeddings()
    assert torch.equal(head.weight, embedding.weight[: len(head.weight)] + 1)


def test_a_conversion_without_boxes_is_done_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write(tmp_path, "qwen3_moe")
    calls = []

    def refuse(parameter: str, *_: Any) -> Any:
        calls.append(parameter)
        raise ValueError("is converted by an unknown operation")

    monkeypatch.setattr(weight_names, "regions_of", refuse)
    check_slices(folder, 2)
    assert calls


# Memory -----------------------------------------------------------------------------------------


class _Inline:
    """An executor without threads, whose allocations the profiler would not see."""

    def __init__(self, _: int) -> None: ...

    def __enter__(self) -> _Inline:
        return self

    def __exit__(self, *_: object) -> None: ...

    def map(self, call: Callable[[Any], Any], values: Iterable[Any]) -> Iterable[Any]:
        return map(call, values)


def peak_bytes(call: Callable[[], Any]) -> tuple[Any, int]:
    """The result of a call, and the most bytes that torch's CPU allocator had given out."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(slices, "ThreadPoolExecutor", _Inline)
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
            result = call()
    results: Any = profiler.profiler
    now = most = 0
    for event in sorted(results.kineto_results.events(), key=lambda event: event.start_ns()):
        if event.name() == "[memory]":
            now += event.nbytes()
            most = max(most, now)
    return result, most


def storage_bytes(module: nn.Module) -> list[int]:
    """Of each storage of a module, largest last."""
    found = {t.untyped_storage().data_ptr(): t.untyped_storage() for _, t in named_tensors(module)}
    return sorted(storage.nbytes() for storage in found.values())


LARGE: dict[str, Any] = {
    "hidden_size": 512,
    "intermediate_size": 8192,
    "moe_intermediate_size": 1024,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "vocab_size": 8192,
}


@pytest.mark.parametrize("load_format", ["auto", "dummy"])
@pytest.mark.parametrize(
    ("arch", "is_tied"), [("llama", False), ("qwen3", True), ("qwen3_moe", False)]
)
def test_loading_allocates_the_slices_alone(
    arch: str, is_tied: bool, load_format: str, tmp_path: Path
) -> None:
    folder = write(tmp_path, arch, **LARGE, tie_word_embeddings=is_tied)
    options: dict[str, Any] = {"load_format": load_format, "dtype": "bfloat16"}

    def load() -> LoadedModel:
        return load_model(folder, shard=Shard(1, 4), **options)

    load()  # imports
    part, most = peak_bytes(load)
    if load_format == "auto":  # the profiler counts a file that is mapped
        most -= (tmp_path / "model.safetensors").stat().st_size
    own = storage_bytes(part.module)
    whole = sum(storage_bytes(load_model(folder, **options).module))
    assert sum(own) <= most <= sum(own) + own[-1] + ONE_BLOCK
    assert sum(own) + own[-1] + ONE_BLOCK < whole


def test_fp8_weights_are_made_one_after_the_other(tmp_path: Path) -> None:
    folder = write(tmp_path, "llama", **LARGE)
    options: dict[str, Any] = {"load_format": "dummy", "quantization": "fp8"}
    load_model(folder, **options)  # imports
    loaded, most = peak_bytes(lambda: load_model(folder, **options))
    plain = load_model(folder, load_format="dummy").module
    matrices = dict(plain.named_parameters())
    largest = max(matrices[name].nbytes for name in loaded.quantized)
    parts = [part for weight in loaded.quantized.values() for part in weight]
    held = sum(storage_bytes(loaded.module)) + sum(part.nbytes for part in parts)
    assert held <= most <= held + 4 * largest + ONE_BLOCK
    assert held + 4 * largest + ONE_BLOCK < sum(storage_bytes(plain))


# Refusals ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "limit"),
    [
        (lambda t: t.pop("model.layers.1.mlp.up_proj.weight"), r"1 are missing: .*1\.mlp\.up_proj"),
        (
            lambda t: t.update({"model.norm.weight": torch.ones(47)}),
            r"1 have other shapes than config\.json says: .*model\.norm\.weight",
        ),
    ],
)
def test_incomplete_weights_are_refused(
    change: Callable[[dict[str, Tensor]], Any], limit: str, tmp_path: Path
) -> None:
    folder = with_tensors(write(tmp_path, "llama"), change)
    for shard in (Shard(), Shard(1, 2)):
        with pytest.raises(InvalidInputError, match=limit) as caught:
            load_model(folder, shard=shard)
        assert caught.value.field == "model"


def test_an_expert_that_is_missing_is_refused(tmp_path: Path) -> None:
    folder = write(tmp_path, "qwen3_moe")
    name = "model.layers.1.mlp.experts.3.up_proj.weight"
    with_tensors(folder, lambda tensors: tensors.pop(name))
    with pytest.raises(InvalidInputError, match=r"must have .*weights"):
        load_model(folder, shard=Shard(1, 2))


def test_files_that_cannot_be_sliced_are_refused(tmp_path: Path) -> None:
    folder = write(tmp_path, "llama")
    os.rename(tmp_path / "model.safetensors", tmp_path / "other.safetensors")
    with pytest.raises(InvalidInputError, match=r"must have weights .*safetensors"):
        load_model(folder, shard=Shard(0, 2))


def test_weights_that_transformers_expands_are_for_one_process(tmp_path: Path) -> None:
    model = tiny_model("llama", **TP_OVERRIDES["llama"])
    model.config.quantization_config = {"quant_method": "mxfp4"}
    model.config.save_pretrained(tmp_path)
    with pytest.raises(InvalidInputError, match="for one process") as caught:
        load_model(str(tmp_path), shard=Shard(0, 2))
    assert caught.value.field == "tensor_parallel_size"


# Random values ----------------------------------------------------------------------------------


def values_of(arch: str, **overrides: Any) -> tuple[InitialValues, dict[str, torch.Size]]:
    from pagespec.compile.load.build_module import skeleton_of

    config = tiny_model(arch, **overrides).config
    with KeptConstants():
        module = skeleton_of(config, dtype=torch.float32)
    shapes = {name: tensor.shape for name, tensor in named_tensors(module)}
    return InitialValues(module, CPU), shapes


def filled(
    values: InitialValues, name: str, shape: Iterable[int], cut: Cut | None = None
) -> Tensor:
    out = torch.full(tuple(shape), torch.nan)
    values.fill(name, out, cut)
    return out


def test_random_matrices_have_the_models_distribution() -> None:
    values, shapes = values_of(
        "llama", hidden_size=256, num_attention_heads=4, pad_token_id=3, vocab_size=4096
    )
    name = "model.embed_tokens.weight"
    table = filled(values, name, shapes[name])
    assert not table[3].any()
    drawn = torch.cat([table[:3], table[4:]]) / 0.02
    assert abs(drawn.mean()) < 0.004
    assert abs(drawn.std() - 1) < 0.004
    assert abs((drawn**4).mean() - 3) < 0.05
    # Neighbours, rows and matrices are not correlated: 1/sqrt of their number is 0.001.
    for one, other in ((drawn[:, 1:], drawn[:, :-1]), (drawn[1:], drawn[:-1])):
        assert abs((one * other).mean()) < 0.004
    up, gate = (
        filled(
            values,
            f"model.layers.0.mlp.{n}_proj.weight",
            shapes[f"model.layers.0.mlp.{n}_proj.weight"],
        )
        for n in ("up", "gate")
    )
    assert abs((up * gate).mean()) < 0.004 * 0.02**2 * 4
    assert torch.linalg.matrix_rank(table) == 256
    assert filled(values, "model.norm.weight", (256,)).eq(1).all()


@pytest.mark.parametrize(
    "cut",
    [
        Cut(0, ((1, 3),)),
        Cut(1, ((8, 16), (40, 48))),
        Cut(2, ((0, 5),)),
        Cut(2, ((7, 12), (20, 48))),
    ],
    ids=str,
)
def test_any_slice_is_drawn_alone(cut: Cut) -> None:
    values, shapes = values_of("qwen3_moe")
    name = "model.layers.0.mlp.experts.gate_up_proj"
    whole = filled(values, name, shapes[name])
    parts = [whole.narrow(cut.dim, begin, end - begin) for begin, end in cut.spans]
    wanted = torch.cat(parts, cut.dim)
    assert torch.equal(filled(values, name, wanted.shape, cut), wanted)


def test_layers_that_compute_their_values_are_initialised_by_their_own_code() -> None:
    """Time constants of the delta rule: logarithms of numbers below 16."""
    values, shapes = values_of("qwen3_next")
    [name] = [n for n in shapes if n.endswith("layers.0.linear_attn.A_log")]
    found = filled(values, name, shapes[name])
    assert found.exp().lt(16).all()
    assert found.unique().numel() == found.numel()
    again, _ = values_of("qwen3_next")
    assert torch.equal(filled(again, name, shapes[name]), found)


def test_a_constructors_constants_are_kept() -> None:
    values, shapes = values_of("apertus")
    name = "model.layers.0.mlp.act_fn.beta"
    assert filled(values, name, shapes[name]) == 0.5
