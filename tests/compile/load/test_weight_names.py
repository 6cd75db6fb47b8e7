"""The weight map: write every tensor of a checkpoint through it.

The model must then be bit-identical to a newly loaded one of the changed checkpoint.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType, GGUFReader
from gguf.quants import quantize
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoConfig
from transformers.core_model_loading import (
    Chunk,
    Concatenate,
    MergeModulelist,
    PermuteForRope,
    Transpose,
    WeightConverter,
)

from pagespec import LLM
from pagespec.compile import weights as weights_module
from pagespec.compile.load.weight_names import regions_of
from pagespec.errors import InvalidInputError
from tests.compile.load import gguf_models
from tests.compile.load.gguf_models import SIZES as GGUF_SIZES
from tests.compile.load.gguf_models import write_whole
from tests.compile.load.weight_checks import answers, bits, engine, held_by, map_of, write_each
from tests.support.models import random_model, tiny_model
from tests.support.quantized_files import SIZES, write_quantized


def changed_file(folder: Path, to: Path, change: Callable[[Tensor], Tensor]) -> dict[str, Tensor]:
    """A copy of a checkpoint with other values, and those values by name."""
    shutil.copytree(folder, to)
    values = {n: change(t).contiguous() for n, t in load_file(folder / "model.safetensors").items()}
    save_file(values, to / "model.safetensors", {"format": "pt"})
    return values


def other(value: Tensor) -> Tensor:
    """Of the same kind, and other in each element."""
    if not value.is_floating_point():
        return value
    noise = torch.rand(value.shape, generator=torch.Generator().manual_seed(value.numel()))
    return (value.float() * (1.02 + noise / 8) + 1e-3).to(value.dtype)


def check(
    folder: Path,
    to: Path,
    groups: Callable[[dict[str, Tensor]], Iterable[dict[str, Tensor]]],
    values: dict[str, Tensor],
    **options: Any,
) -> LLM:
    """An engine of ``folder``, overwritten with the weights of ``to``, is an engine of ``to``."""
    content = (folder / "model.safetensors").read_bytes()
    llm = engine(folder, **options)
    check_written(llm, engine(to, **options), groups(values), set(values))
    assert (folder / "model.safetensors").read_bytes() == content
    return llm


def check_written(
    llm: LLM, fresh: LLM, groups: Iterable[dict[str, Tensor]], names: set[str]
) -> None:
    """``llm`` with ``groups`` written to it is as ``fresh``; ``names``: all that it has."""
    wanted = answers(fresh)
    assert answers(llm) != wanted
    assert set(map_of(llm).names) == names
    write_each(llm, groups)
    llm.reset_prefix_cache()
    assert answers(llm) == wanted
    pairs = zip(held_by(llm), held_by(fresh), strict=True)
    assert all(torch.equal(bits(one), bits(two)) for one, two in pairs)


def singly(values: dict[str, Tensor]) -> Iterable[dict[str, Tensor]]:
    return ({name: value} for name, value in values.items())


def check_float(arch: str, tmp_path: Path, overrides: dict[str, Any], **options: Any) -> LLM:
    tiny_model(arch, **overrides).save_pretrained(tmp_path / "old")
    values = changed_file(tmp_path / "old", tmp_path / "new", other)
    return check(tmp_path / "old", tmp_path / "new", singly, values, **options)


def test_dense_merged_and_tied(tmp_path: Path) -> None:
    overrides = {"tie_word_embeddings": True, "num_hidden_layers": 2}
    llm = check_float("qwen3", tmp_path, overrides)
    weights = map_of(llm)
    [merged, *packed] = weights.locate("model.layers.1.self_attn.k_proj.weight")
    assert merged.storage.shape[0] > merged.slice[0].stop > merged.slice[0].start > 0
    assert all(place.storage.is_mkldnn for place in packed)


def test_mixture_of_experts(tmp_path: Path) -> None:
    check_float("qwen3_moe", tmp_path, {"num_hidden_layers": 1})


@pytest.mark.nightly
def test_hybrid(tmp_path: Path) -> None:
    check_float("qwen3_next", tmp_path, {})


@pytest.mark.nightly
@pytest.mark.parametrize("arch", ["deepseek_v3", "gemma2", "gpt2", "phi3", "mixtral", "falcon_h1"])
def test_other_architectures(arch: str, tmp_path: Path) -> None:
    check_float(arch, tmp_path, {})


@pytest.mark.nightly
@pytest.mark.parametrize(
    "options",
    [{"compile": "eager"}, {"compile": "inductor"}, {"transparent": False}, {"dtype": "bfloat16"}],
    ids=str,
)
def test_other_ways_to_run(options: dict[str, Any], tmp_path: Path) -> None:
    check_float("qwen2", tmp_path, {}, **options)


def layers(values: dict[str, Tensor]) -> Iterable[dict[str, Tensor]]:
    """The tensors of a quantised layer together."""
    groups: dict[str, dict[str, Tensor]] = {}
    for name, value in values.items():
        groups.setdefault(name.rpartition(".")[0], {})[name] = value
    return groups.values()


def check_quantized(layout: str, tmp_path: Path) -> None:
    write_quantized(tmp_path / "old", layout)
    write_quantized(tmp_path / "new", layout, seed=1)
    values = load_file(tmp_path / "new" / "model.safetensors")
    check(tmp_path / "old", tmp_path / "new", layers, values)


@pytest.mark.parametrize("layout", [pytest.param("fp8 blocks", marks=pytest.mark.nightly), "awq"])
def test_quantized_checkpoint(layout: str, tmp_path: Path) -> None:
    check_quantized(layout, tmp_path)


@pytest.mark.nightly
@pytest.mark.parametrize(
    "layout", ["fp8 channels", "fp8 tensors", "gptq", "packed int4 asymmetric"]
)
def test_other_layouts(layout: str, tmp_path: Path) -> None:
    check_quantized(layout, tmp_path)


@pytest.mark.nightly
def test_inputs_in_another_order(tmp_path: Path) -> None:
    write_quantized(tmp_path / "old", "gptq sorted")
    values = changed_file(tmp_path / "old", tmp_path / "new", other)
    llm = check(tmp_path / "old", tmp_path / "new", layers, values)
    layer = "model.layers.0.self_attn.k_proj"
    parts = {name: value for name, value in values.items() if name.startswith(layer)}
    parts[f"{layer}.g_idx"] = parts[f"{layer}.g_idx"].flip(0)
    before = [bits(tensor) for tensor in held_by(llm)]
    with pytest.raises(InvalidInputError, match="another order"):
        map_of(llm).write_all(parts)
    assert all(map(torch.equal, before, map(bits, held_by(llm))))


@pytest.mark.nightly
def test_fp8_at_load(tmp_path: Path) -> None:
    tiny_model("llama", **SIZES).save_pretrained(tmp_path / "old")
    values = changed_file(tmp_path / "old", tmp_path / "new", other)
    check(tmp_path / "old", tmp_path / "new", singly, values, quantization="fp8")


def write_gguf(path: Path, seed: int) -> dict[str, Tensor]:
    """A file with matrices in Q4_0 and Q8_0; what it holds by name."""
    formats = {"ffn_up": "Q4_0", "ffn_gate": "Q4_0", "attn_q": "Q4_1", "attn_k": "Q4_1"}
    plain = gguf_models.GGUFWriter.add_tensor

    def add(self: Any, name: str, values: Any, **_: Any) -> None:
        if values.ndim != 2:
            return plain(self, name, values)
        kind = GGMLQuantizationType[formats.get(name.split(".")[-2], "Q8_0")]
        return plain(self, name, quantize(values, kind), raw_dtype=kind)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gguf_models.GGUFWriter, "add_tensor", add)
        model = tiny_gguf(seed)
        write_whole(path, "llama", model=model)
    return {t.name: torch.from_numpy(np.array(t.data)) for t in GGUFReader(path).tensors}


def tiny_gguf(seed: int) -> Any:
    return random_model(AutoConfig.for_model("llama", **GGUF_SIZES), seed)


@pytest.mark.nightly
@pytest.mark.parametrize("quantization", ["gguf", None])
def test_gguf(quantization: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PAGESPEC_CACHE", str(tmp_path / "cache"))
    write_gguf(tmp_path / "old.gguf", 0)
    values = write_gguf(tmp_path / "new.gguf", 1)
    llm = engine(tmp_path / "old.gguf", quantization=quantization)
    fresh = engine(tmp_path / "new.gguf", quantization=quantization)
    check_written(llm, fresh, singly(values), set(values))


@pytest.mark.nightly
@pytest.mark.parametrize("arch", ["gemma2", "qwen2moe", "qwen3moe"])
def test_gguf_of_other_architectures(
    arch: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their files have norms less one, and the matrices of all experts as one tensor."""
    monkeypatch.setenv("PAGESPEC_CACHE", str(tmp_path / "cache"))
    kind, own = gguf_models.MODELS[arch]
    for seed, name in enumerate(("old", "new")):
        model = random_model(AutoConfig.for_model(kind, **GGUF_SIZES, **own), seed)
        write_whole(tmp_path / f"{name}.gguf", arch, model=model)
    tensors = GGUFReader(tmp_path / "new.gguf").tensors
    values = {t.name: torch.from_numpy(np.array(t.data)) for t in tensors}
    llm, fresh = engine(tmp_path / "old.gguf"), engine(tmp_path / "new.gguf")
    check_written(llm, fresh, singly(values), set(values))


@pytest.mark.nightly
def test_restored_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A start that restores the traced graph has the same weight map; the record's file is not
    written."""
    tiny_model("llama").save_pretrained(tmp_path / "old")
    values = changed_file(tmp_path / "old", tmp_path / "new", other)
    monkeypatch.setenv("PAGESPEC_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("pagespec.build.may_restore", lambda: True)
    first = engine(tmp_path / "old")
    second = check(tmp_path / "old", tmp_path / "new", singly, values)
    assert type(second._runner.captured.loaded.module).__name__ == "TensorTree"
    first, second = map_of(first), map_of(engine(tmp_path / "old"))
    for name in values:
        one, two = ([p[1:] for p in found.locate(name)] for found in (first, second))
        assert one == two


@pytest.mark.nightly
def test_two_ranks(tmp_path: Path) -> None:
    tiny_model("qwen3_moe", num_hidden_layers=1).save_pretrained(tmp_path / "old")
    changed_file(tmp_path / "old", tmp_path / "new", other)
    command = [sys.executable, "-m", "tests.compile.load.rank_weights"]
    places = [str(tmp_path / name) for name in ("store", "old", "new")]
    ranks = [
        subprocess.Popen(
            [*command, str(rank), *places], stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        )
        for rank in range(2)
    ]
    texts = [rank.communicate()[0].decode() for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0], texts


# Conversions ------------------------------------------------------------------------------------

STACK, CAT = MergeModulelist(0), Concatenate(1)
CONVERTERS = [
    (["e.*.gate", "e.*.up"], ["e.both"], [STACK, CAT]),
    (["e.*.gate", "e.*.up"], ["e.both"], [STACK, CAT, Transpose(1, 2)]),
    (["e.*.down"], ["e.down"], [STACK, Transpose(1, 2)]),
    (["e.q", "e.k"], ["e.qk"], [Concatenate(0)]),
    (["e.both"], ["e.gate", "e.up"], [Chunk(0)]),
    (["e.both"], ["e.gate", "e.up", "e.more"], [Chunk(1)]),
    (["e.conv"], ["e.conv_t"], [Transpose(0, 1, check_dims=True)]),
]


@pytest.mark.parametrize(("sources", "targets", "operations"), CONVERTERS)
def test_boxes_are_those_that_the_conversion_fills(
    sources: list[str], targets: list[str], operations: list[Any]
) -> None:
    """The results of transformers' conversion equal the contents of the boxes."""
    converter = WeightConverter(sources, targets, operations)
    given = {
        pattern: {
            pattern.replace("*", str(i)): torch.randn(6, 9) for i in range(1 + 2 * ("*" in pattern))
        }
        for pattern in converter.source_patterns
    }
    made: Any = {pattern: list(tensors.values()) for pattern, tensors in given.items()}
    module = SimpleNamespace(get_parameter=lambda _: torch.empty(9, 6))
    for operation in operations:
        made = operation.convert(
            made,
            source_patterns=converter.source_patterns,
            target_patterns=converter.target_patterns,
            model=module,
            full_layer_name=targets[0],
        )
    made = {key: part[0] if isinstance(part, list) else part for key, part in made.items()}
    shapes = {p: {n: t.shape for n, t in tensors.items()} for p, tensors in given.items()}
    found = regions_of(targets[0], converter, shapes, {n: t.shape for n, t in made.items()})
    filled = {name: torch.full_like(tensor, torch.nan) for name, tensor in made.items()}
    for tensors in given.values():
        for name, tensor in tensors.items():
            for region in found[name]:
                filled[region.parameter][region.slices] = region.part_of(tensor)
    assert all(torch.equal(filled[name], tensor) for name, tensor in made.items())


def test_a_conversion_that_is_no_box_is_refused() -> None:
    converter = WeightConverter(["e.q"], ["e.r"], [PermuteForRope()])
    with pytest.raises(ValueError, match="PermuteForRope"):
        regions_of("e.r", converter, {"e.q": {"e.q": (6, 9)}}, {"e.r": (6, 9)})


# Refusals ---------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tied(tmp_path_factory: pytest.TempPathFactory) -> tuple[LLM, dict[str, Tensor]]:
    """An engine of a checkpoint that has both names of one tied parameter, and a tensor more."""
    folder = tmp_path_factory.mktemp("tied")
    tiny_model("llama", tie_word_embeddings=True, num_hidden_layers=1).save_pretrained(folder)
    values = load_file(folder / "model.safetensors")
    values["lm_head.weight"] = values["model.embed_tokens.weight"].clone()
    values["mtp.norm.weight"] = torch.ones(4)
    save_file(values, folder / "model.safetensors", {"format": "pt"})
    return engine(folder), values


NORM, HEAD = "model.norm.weight", "lm_head.weight"


@pytest.mark.parametrize(
    ("name", "change", "limit"),
    [
        ("model.layers.7.norm.weight", lambda _: torch.ones(48), "is no tensor"),
        ("mtp.norm.weight", lambda v: v, "is not read"),
        (NORM, lambda v: v[:-1], "shape"),
        (NORM, lambda v: v.int(), "int32"),
        (NORM, lambda v: v.double(), "float64"),
        (HEAD, lambda v: v + 1, "in one call"),
    ],
)
def test_what_is_refused_changes_nothing(
    tied: tuple[LLM, dict[str, Tensor]], name: str, change: Callable[[Tensor], Tensor], limit: str
) -> None:
    llm, values = tied
    before = [bits(tensor) for tensor in held_by(llm)]
    up = "model.layers.0.mlp.up_proj.weight"
    wrong = change(values.get(name, values[NORM]))
    with pytest.raises(InvalidInputError, match=limit) as caught:
        map_of(llm).write_all({up: values[up] + 1, name: wrong})
    assert name in str(caught.value)
    assert all(map(torch.equal, before, map(bits, held_by(llm))))


def test_a_failure_while_writing_changes_nothing(
    tied: tuple[LLM, dict[str, Tensor]], monkeypatch: pytest.MonkeyPatch
) -> None:
    llm, values = tied
    before = [bits(tensor) for tensor in held_by(llm)]
    wanted = answers(llm)
    make, calls = weights_module._make_again, []

    def fail_once(copies: Any) -> None:
        calls.append(copies)
        make(copies)
        if len(calls) == 1:
            raise MemoryError

    monkeypatch.setattr(weights_module, "_make_again", fail_once)
    with pytest.raises(MemoryError):
        map_of(llm).write(
            "model.layers.0.mlp.up_proj.weight", values["model.layers.0.mlp.up_proj.weight"] + 1
        )
    assert all(map(torch.equal, before, map(bits, held_by(llm))))
    llm.reset_prefix_cache()
    assert answers(llm) == wanted


def test_both_names_of_a_tied_parameter_in_one_call(tied: tuple[LLM, dict[str, Tensor]]) -> None:
    llm, values = tied
    head = values[HEAD] + 1
    map_of(llm).write_all({HEAD: head, "model.embed_tokens.weight": head})
    found = [bits(t) for t in held_by(llm) if t.shape == head.shape]
    assert found
    assert all(torch.equal(one, bits(head)) for one in found)


def test_a_part_of_a_quantised_layer_is_refused(tmp_path: Path) -> None:
    write_quantized(tmp_path, "fp8 blocks", num_hidden_layers=1)
    values = load_file(tmp_path / "model.safetensors")
    llm = engine(tmp_path)
    before = [bits(tensor) for tensor in held_by(llm)]
    name = "model.layers.0.mlp.up_proj.weight"
    with pytest.raises(InvalidInputError, match="weight_scale_inv"):
        map_of(llm).write(name, values[name])
    assert all(map(torch.equal, before, map(bits, held_by(llm))))
