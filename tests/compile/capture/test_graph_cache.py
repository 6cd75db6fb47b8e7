"""The disk cache of graphs: a hit returns the same graph, and only for the same model and code."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.fx import GraphModule
from torch.utils._pytree import tree_leaves
from transformers.models.llama import modeling_llama

from pagespec import LLM, SamplingParams
from pagespec.compile.capture import dynamo as dynamo_module
from pagespec.compile.capture import process_key
from pagespec.compile.capture.dynamo import trace
from pagespec.compile.capture.graph_cache import GraphCache, graph_key
from pagespec.compile.capture.graph_json import NotSerializable, decode, encode
from pagespec.compile.captured_model import capture_model
from pagespec.compile.load.load import load_model
from pagespec.compile.model.loaded import LoadedModel, named_tensors
from pagespec.compile.probe.probe import probe_model
from pagespec.kernels.attention.attention_spec import AttentionSpec
from pagespec.runner.cpu.runner import ModelRunner
from tests.compile.test_captured_model import LogitRecorder, prompts
from tests.support.captures import OVERRIDES
from tests.support.driving import drive, make_requests
from tests.support.models import BY_DAY, tiny_model

Probed = tuple[LoadedModel, list[AttentionSpec]]


def probed(arch: str = "llama", **changes: Any) -> Probed:
    loaded = load_model(tiny_model(arch, **changes))
    return loaded, probe_model(loaded)


def one_layer() -> Probed:
    """A tiny Llama for tests in which it is traced and its size does not matter."""
    return probed(num_hidden_layers=1)


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the graph of :func:`one_layer` and nothing else."""
    folder = tmp_path_factory.mktemp("graphs")
    assert capture_model(*one_layer(), graph_cache=GraphCache(folder)).num_captures == 1
    return folder


def no_tracing() -> None:
    raise AssertionError("traced again")


def description(gm: GraphModule) -> list[Any]:
    """All properties of a graph: its nodes, and the layout, memory and identity of each result."""
    numbers: dict[int, int] = {}

    def of(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return type(value), str(value)
        memory = numbers.setdefault(value.untyped_storage()._cdata, len(numbers))
        layout = str((value.shape, value.stride(), value.storage_offset()))
        kind = type(value), isinstance(value, torch.nn.Parameter), value.requires_grad
        itself = numbers.setdefault(id(value), len(numbers))
        return layout, value.dtype, value.device, kind, value.is_inference(), memory, itself

    return [
        (
            *(node.op, node.name, node.target, str(node.args), str(node.kwargs)),
            [of(leaf) for leaf in tree_leaves(node.meta.get("example_value"))],
        )
        for node in gm.graph.nodes
    ]


def tokens_and_logits(captured: Any) -> tuple[list[list[int]], dict[Any, torch.Tensor]]:
    recorder = LogitRecorder()
    runner = ModelRunner(captured, block_size=16, num_blocks=40, on_logits=recorder)
    requests = make_requests(prompts(), 4)
    drive(runner, requests, block_size=16, num_blocks=40, chunk=10)
    return [r.output_token_ids for r in requests], recorder.logits


@pytest.mark.parametrize("arch", BY_DAY)
def test_the_graph_comes_back_and_computes_the_same(
    arch: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded, specs = probed(arch, **OVERRIDES.get(arch, {}))
    traced = trace(loaded, specs)
    data = json.loads(json.dumps(encode(traced, dict(named_tensors(loaded.module)))))
    again = decode(data, dict(named_tensors(loaded.module)))
    assert description(again.gm) == description(traced.gm)
    assert again.sources == traced.sources
    assert {k: id(v) for k, v in again.constants.items()} == {
        k: id(v) for k, v in traced.constants.items()
    }

    monkeypatch.setattr(dynamo_module, "trace", lambda *_: traced)
    first = capture_model(loaded, specs, graph_cache=GraphCache(tmp_path))
    assert first.num_captures == 1
    loaded, specs = probed(arch, **OVERRIDES.get(arch, {}))  # the same weights in other places
    second = capture_model(loaded, specs, graph_cache=GraphCache(tmp_path, no_tracing))
    assert second.num_captures == 0
    assert second.rewrites == first.rewrites
    tokens, logits = tokens_and_logits(first)
    tokens_again, logits_again = tokens_and_logits(second)
    assert tokens_again == tokens
    assert logits_again.keys() == logits.keys()
    assert all(torch.equal(logits_again[key], logits[key]) for key in logits)


def _relu_mlp(self: Any, x: torch.Tensor) -> torch.Tensor:
    return self.down_proj(torch.relu(self.gate_proj(x)) * self.up_proj(x))


def _other_code(file: str) -> str | None:
    return "another" if file.endswith("kernels/ops.py") else _CODE_OF_FILE(file)


_CODE_OF_FILE = process_key.code_of_file


def _with(owner: Any, name: str, value: object) -> Callable[[pytest.MonkeyPatch], Probed]:
    """A module whose code, or a value beside it, is another."""

    def change(patch: pytest.MonkeyPatch) -> Probed:
        patch.setattr(owner, name, value, raising=False)
        return probed()

    return change


def _hooked(_: pytest.MonkeyPatch) -> Probed:
    loaded, specs = probed()
    loaded.module.model.norm.register_forward_hook(lambda *_: None)  # type: ignore[union-attr]
    return loaded, specs


def _attribute(_: pytest.MonkeyPatch) -> Probed:
    loaded, specs = probed()
    loaded.module.model.norm.variance_epsilon = 1e-3  # type: ignore[union-attr]
    return loaded, specs


def _tied(_: pytest.MonkeyPatch) -> Probed:
    loaded, specs = probed()
    layers: Any = loaded.module.model.layers  # type: ignore[union-attr]
    layers[0].input_layernorm.weight = layers[1].input_layernorm.weight
    return loaded, specs


def _other_spec(_: pytest.MonkeyPatch) -> Probed:
    loaded, specs = probed()
    return loaded, [dataclasses.replace(spec, softcap=5.0) for spec in specs]


def _environment(monkeypatch: pytest.MonkeyPatch) -> Probed:
    monkeypatch.setenv("TORCHDYNAMO_INLINE_INBUILT_NN_MODULES", "0")
    return probed()


@pytest.mark.parametrize(
    "change",
    [
        lambda _: probed(rms_norm_eps=1e-3),
        lambda _: probed(intermediate_size=80),
        lambda _: probed("mistral"),
        _with(modeling_llama.LlamaMLP, "forward", _relu_mlp),
        _with(modeling_llama, "rotate_half", lambda x: -x),
        _hooked,
        _attribute,
        _tied,
        _other_spec,
        _environment,
        _with(process_key, "code_of_file", _other_code),
        _with(modeling_llama, "SCALE", 2.0),
    ],
)
def test_the_key_follows_what_tracing_depends_on(
    change: Callable[[pytest.MonkeyPatch], Probed], monkeypatch: pytest.MonkeyPatch
) -> None:
    before = graph_key(*probed())
    with monkeypatch.context() as patch:
        assert graph_key(*change(patch)) != before
    assert graph_key(*probed()) == before


def test_the_key_does_not_change_by_tracing() -> None:
    loaded, specs = one_layer()
    before = graph_key(loaded, specs)
    capture_model(loaded, specs)
    assert graph_key(*one_layer()) == before


def _half(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-1000])


def _another_function(file: Path) -> None:
    file.write_bytes(file.read_bytes().replace(b"torch.rsqrt", b"torch.rsqr_"))


def _of_another_model(file: Path) -> None:
    folder = file.parent.with_name("of another model")
    capture_model(*probed("qwen3", num_hidden_layers=1), graph_cache=GraphCache(folder))
    (other,) = folder.iterdir()
    other.replace(file)


def _open_to_others(file: Path) -> None:
    file.chmod(0o620)


def _no_file(file: Path) -> None:
    file.unlink()
    file.mkdir()


@pytest.mark.parametrize(
    "damage", [_half, _another_function, _of_another_model, _open_to_others, _no_file]
)
def test_a_file_that_cannot_be_trusted_is_ignored(
    damage: Callable[[Path], None], tmp_path: Path, kept: Path
) -> None:
    first = capture_model(*one_layer(), graph_cache=GraphCache(kept))
    assert first.num_captures == 0
    (file,) = shutil.copytree(kept, tmp_path / "damaged").iterdir()
    damage(file)
    second = capture_model(*one_layer(), graph_cache=GraphCache(file.parent))
    assert second.num_captures == 1
    assert tokens_and_logits(second)[0] == tokens_and_logits(first)[0]
    if damage is not _no_file:
        assert capture_model(*one_layer(), graph_cache=GraphCache(file.parent)).num_captures == 0


def test_a_file_of_another_user_is_ignored(kept: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    me = os.getuid()
    monkeypatch.setattr(os, "getuid", lambda: me + 1)
    assert capture_model(*one_layer(), graph_cache=GraphCache(kept)).num_captures == 1


def test_what_has_no_form_in_a_file_is_not_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded, specs = one_layer()
    norm: Any = type(loaded.module.model.norm)  # type: ignore[union-attr]
    # A call of a function that no other process finds by its name.
    twice = torch._dynamo.allow_in_graph(lambda x: 2.0 * x)
    monkeypatch.setattr(norm, "forward", lambda _, x: twice(x))
    traced = trace(loaded, specs)
    with pytest.raises(NotSerializable, match="call of"):
        encode(traced, dict(named_tensors(loaded.module)))
    assert capture_model(loaded, specs, graph_cache=GraphCache(tmp_path)).num_captures == 1
    assert not list(tmp_path.iterdir())


def test_a_graph_with_a_size_of_data_is_traced_each_time(tmp_path: Path) -> None:
    """jetmoe splits rows by expert; the number of rows per expert has no hint."""
    loaded, specs = probed("jetmoe", num_hidden_layers=1)
    graph_cache = GraphCache(tmp_path)
    for _ in range(2):
        traced, is_new = graph_cache.get(loaded, specs)
        assert is_new
        assert len(traced.gm.graph.nodes) > 100


def test_an_engine_keeps_the_graph_of_a_folder_but_not_of_a_module(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PAGESPEC_CACHE", str(tmp_path / "cache"))
    model = tiny_model("llama", num_hidden_layers=1)
    model.save_pretrained(tmp_path / "model")

    def run(what: Any) -> tuple[int, list[int]]:
        llm = LLM(what, device="cpu", max_model_len=64)
        params = SamplingParams(temperature=0.0, max_tokens=6)
        (output,) = llm.generate([[3, 5, 8]], params, use_tqdm=False)
        return llm.stats().num_captures, list(output.outputs[0].token_ids)

    given = run(model)
    assert given[0] == 1
    assert not (tmp_path / "cache" / "graphs").exists()
    assert run(tmp_path / "model") == given
    assert len(list((tmp_path / "cache" / "graphs").iterdir())) == 1
    assert run(tmp_path / "model") == (0, given[1])
    # The folder's path does not matter.
    (tmp_path / "model").rename(tmp_path / "moved")
    assert run(tmp_path / "moved") == (0, given[1])
