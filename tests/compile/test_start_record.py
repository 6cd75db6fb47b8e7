"""Start records: a restored model equals the original, and only for the same files and code."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers.models.llama import modeling_llama

from pagespec.compile import start_record
from pagespec.compile.capture import process_key
from pagespec.compile.capture.results import _PRIMES
from pagespec.compile.captured_model import CapturedModel, CaptureOptions, capture_model
from pagespec.compile.load.gguf_blocks import _file_beside
from pagespec.compile.load.load import load_model
from pagespec.compile.load.source import find_source
from pagespec.compile.probe.probe import probe_model
from pagespec.compile.start_record import Restored, StartRecord
from pagespec.kernels.attention.attention_spec import AttentionSpec
from tests.compile.capture.test_graph_cache import tokens_and_logits
from tests.support.apart import run_apart
from tests.support.captures import OVERRIDES, graph_cache
from tests.support.gguf_files import gguf_model
from tests.support.models import BY_DAY, tiny_model
from tests.support.quantized_files import SIZES, write_quantized
from tests.support.tokenizers import byte_level
from tests.test_imports import MODULES, layer_of, path_of, read_imports

CPU = torch.device("cpu")
# What they cost is most of a start that needs them.
HEAVY = (
    "accelerate",
    "fastapi",
    "networkx",
    "pandas",
    "pydantic",
    "sklearn",
    "scipy",
    "sympy",
    "torch._dynamo",
    "torch._inductor",
    "torch.distributed.tensor",
    "torchvision",
    "transformers.generation",
    "transformers.modeling_utils",
    "transformers.models",
    "triton",
)


def record_of(
    model: Path,
    cache: Path,
    dtype: str = "auto",
    *,
    compiled: bool = False,
    quantization: str | None = None,
) -> StartRecord:
    return StartRecord(
        cache / "starts",
        cache / "graphs",
        find_source(model),
        dtype=dtype,
        device=CPU,
        is_compiled=compiled,
        quantization=quantization,
    )


def start(
    model: Path, cache: Path, dtype: str = "auto", *, quantization: str | None = None
) -> CapturedModel:
    """A start with the module, which writes a record if it can."""
    record = record_of(model, cache, dtype, quantization=quantization)
    loaded = load_model(model, dtype=dtype, quantization=quantization)
    specs = probe_model(loaded)
    described = record.describe(loaded, specs)
    graphs = graph_cache()
    captured = capture_model(
        loaded, specs, CaptureOptions(packing_bytes=1 << 30), graph_cache=graphs
    )
    if graphs.key is not None:
        (cache / "graphs").mkdir(parents=True, exist_ok=True)
        shutil.copy2(graphs.folder / f"{graphs.key}.json", cache / "graphs")
    record.write(described, graphs.key)
    return captured


def capture_restored(restored: Restored) -> CapturedModel:
    captured = capture_model(
        restored.loaded,
        restored.specs,
        CaptureOptions(packing_bytes=1 << 30),
        traced=restored.traced,
    )
    assert captured.num_captures == 0
    return captured


def code_of(captured: CapturedModel) -> str:
    """The code of the graph, without Dynamo's types for its arguments."""
    assert captured.graph is not None
    return re.sub(r" : [\w.]+", "", captured.graph.code)


@pytest.fixture(scope="module")
def started(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The folder of a model, and a cache with the record of its start."""
    folder = tmp_path_factory.mktemp("started")
    tiny_model("llama", num_hidden_layers=1).save_pretrained(folder / "model")
    start(folder / "model", folder / "cache")
    return folder / "model", folder / "cache"


@pytest.mark.parametrize("arch", BY_DAY)
def test_a_restored_model_computes_the_same(arch: str, tmp_path: Path) -> None:
    folder, cache = tmp_path / "model", tmp_path / "cache"
    tiny_model(arch, **OVERRIDES.get(arch, {})).save_pretrained(folder)
    first = start(folder, cache)
    restored = record_of(folder, cache).restore()
    if restored is None:
        # Its experts are put together as they are read.
        assert "moe" in arch
        return
    loaded, of_module = restored.loaded, first.loaded
    for field in ("eos_token_ids", "vocab_size", "max_position_embeddings", "model_type"):
        assert getattr(loaded, field) == getattr(of_module, field)
    for field in ("architecture", "dtype", "device", "default_sampling"):
        assert getattr(loaded, field) == getattr(of_module, field)
    second = capture_restored(restored)
    assert second.specs == first.specs  # by then those of the passes
    assert second.rewrites == first.rewrites
    assert code_of(second) == code_of(first)
    assert not any(str(prime) in code_of(second) for prime in _PRIMES)
    tokens, logits = tokens_and_logits(first)
    tokens_again, logits_again = tokens_and_logits(second)
    assert tokens_again == tokens
    assert logits_again.keys() == logits.keys()
    assert all(torch.equal(logits_again[key], logits[key]) for key in logits)


def test_specs_are_read_as_they_were_written() -> None:
    spec = AttentionSpec(1, 2, 2, 8, 8, 0.5, chunk=24, alibi_slopes=(0.25, 0.0625))
    assert start_record._spec(json.loads(json.dumps(asdict(spec)))) == spec


def test_a_graph_for_a_compiler_has_symbols(started: tuple[Path, Path]) -> None:
    folder, cache = started
    # The same key: what the graph is read for is not what it depends on.
    restored = record_of(folder, cache, compiled=True).restore()
    assert restored is not None
    sources = restored.traced.sources
    nodes = restored.traced.gm.graph.nodes
    (ids,) = (node for node in nodes if sources.get(node.name) == ("input", "input_ids"))
    assert isinstance(ids.meta["example_value"].shape[1], torch.SymInt)
    plain = record_of(folder, cache).restore()
    assert plain is not None
    assert code_of(capture_restored(restored)) == code_of(capture_restored(plain))


def test_weights_in_the_dtype_that_was_asked_for(tmp_path: Path) -> None:
    folder, cache = tmp_path / "model", tmp_path / "cache"
    tiny_model("llama", num_hidden_layers=1).save_pretrained(folder)
    first = start(folder, cache, "bfloat16")
    assert record_of(folder, cache).restore() is None
    restored = record_of(folder, cache, "bfloat16").restore()
    assert restored is not None
    assert restored.loaded.dtype == torch.bfloat16
    # Rotary frequencies stay float32.
    dtypes = {str(b.dtype) for b in restored.loaded.module.buffers()}
    assert dtypes == {str(b.dtype) for b in first.loaded.module.buffers()}
    assert tokens_and_logits(capture_restored(restored))[0] == tokens_and_logits(first)[0]


def test_the_tokenizer_is_the_same(tmp_path: Path) -> None:
    folder, cache = tmp_path / "model", tmp_path / "cache"
    tiny_model("llama", num_hidden_layers=1).save_pretrained(folder)
    byte_level().save_pretrained(folder)
    first = start(folder, cache).loaded.tokenizer
    restored = record_of(folder, cache).restore()
    assert restored is not None
    again = restored.loaded.tokenizer
    assert type(again) is type(first)
    assert again.get_vocab() == first.get_vocab()
    assert again.chat_template == first.chat_template
    assert again.backend_tokenizer.to_str() == first.backend_tokenizer.to_str()


def _other_weights(folder: Path) -> None:
    file = folder / "model.safetensors"
    tensors = load_file(file)
    save_file({name: tensor + 1 for name, tensor in tensors.items()}, file, {"format": "pt"})


def _other_config(folder: Path) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"rms_norm_eps": 0.25}))


def _touched(folder: Path) -> None:
    os.utime(folder / "model.safetensors", ns=(1, 1))


def _tokenizer(folder: Path) -> None:
    byte_level().save_pretrained(folder)


@pytest.mark.parametrize("change", [_other_weights, _other_config, _touched, _tokenizer])
def test_not_for_other_files(
    change: Callable[[Path], None], started: tuple[Path, Path], tmp_path: Path
) -> None:
    # Beside the model, under whose name it was started.
    folder, cache = started
    aside = shutil.copytree(folder, tmp_path / "aside", copy_function=shutil.copy2)
    try:
        change(folder)
        assert record_of(folder, cache).restore() is None
    finally:
        shutil.rmtree(folder)
        shutil.copytree(aside, folder, copy_function=shutil.copy2)
    assert record_of(folder, cache).restore() is not None


@pytest.mark.parametrize(
    ("owner", "name"),
    [
        (modeling_llama.LlamaMLP, "forward"),
        (modeling_llama, "rotate_half"),
        (modeling_llama, "eager_attention_forward"),
    ],
)
def test_not_for_code_that_was_replaced(
    owner: Any, name: str, started: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(owner, name, lambda *_: None)
        assert record_of(*started).restore() is None
    assert record_of(*started).restore() is not None


def _edit(cache: Path, change: Callable[[bytes], bytes]) -> None:
    (file,) = (cache / "starts").iterdir()
    file.write_bytes(change(file.read_bytes()))


@pytest.mark.parametrize(
    "damage",
    [
        lambda cache: _edit(cache, lambda text: text[:-10]),
        lambda cache: _edit(cache, lambda text: text.replace(b"LlamaFor", b"LlamaFop")),
        lambda cache: next((cache / "starts").iterdir()).chmod(0o622),
        lambda cache: next((cache / "graphs").iterdir()).unlink(),
    ],
)
def test_a_damaged_record_is_not_used(
    damage: Callable[[Path], None], started: tuple[Path, Path], tmp_path: Path
) -> None:
    folder, cache = started[0], shutil.copytree(started[1], tmp_path / "cache")
    assert record_of(folder, cache).restore() is not None
    damage(cache)
    assert record_of(folder, cache).restore() is None


def test_the_code_of_all_packages_that_load_probe_and_trace_counts() -> None:
    begun = {"load", "probe", "capture"}
    reached = {
        layer_of(edge.target, "compile")
        for module, is_package in MODULES.items()
        if module.startswith("compile.") and layer_of(module, "compile") in begun
        for edge in read_imports(path_of(module, is_package).read_text(), module, MODULES)
        if edge.target.startswith("compile.")
    }
    folders = {name for name in begun | reached if MODULES[f"compile.{name}"]}
    patterns = process_key.OWN_CODE
    assert folders == {part.split("/")[0] for part in patterns if part.endswith("/*.py")}
    home = Path(start_record.__file__).parent
    assert all([*home.glob(pattern)] for pattern in patterns)


def test_no_record_of_a_module_that_is_not_its_files(tmp_path: Path) -> None:
    folder, cache = tmp_path / "model", tmp_path / "cache"
    tiny_model("llama", num_hidden_layers=1).save_pretrained(folder)
    loaded = load_model(folder)
    record = record_of(folder, cache)
    with torch.no_grad():
        loaded.module.get_parameter("model.norm.weight")[3] += 1e-6
    record.write(record.describe(loaded, probe_model(loaded)), "a graph")
    assert not (cache / "starts").exists()


def quantised_model(form: str, folder: Path, patch: pytest.MonkeyPatch) -> tuple[Path, str | None]:
    """A checkpoint held quantised, and the expected value of ``quantization``."""
    if form == "gguf":
        return Path(gguf_model(folder, patch)), "gguf"
    if form == "fp8 made at load":
        tiny_model("llama", num_hidden_layers=2, **SIZES).save_pretrained(folder / "model")
        return folder / "model", "fp8"
    (folder / "model").mkdir()
    write_quantized(folder / "model", form)
    return folder / "model", None


FORMS = ("gguf", "fp8 made at load", "fp8 blocks", "fp8 tensors", "awq", "gptq", "packed int4")


@pytest.mark.parametrize("form", FORMS)
def test_quantised_weights_are_the_same(
    form: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, quantization = quantised_model(form, tmp_path, monkeypatch)
    cache = tmp_path / "cache"
    first = start(model, cache, quantization=quantization)
    assert (
        record_of(model, cache, quantization="fp8" if quantization is None else None).restore()
        is None
    )
    restored = record_of(model, cache, quantization=quantization).restore()
    assert restored is not None
    assert restored.loaded.quantized
    assert restored.loaded.quantization == first.loaded.quantization
    second = capture_restored(restored)
    assert second.weight_formats == first.weight_formats
    assert second.float32_matrices == first.float32_matrices
    tokens, logits = tokens_and_logits(first)
    tokens_again, logits_again = tokens_and_logits(second)
    assert tokens_again == tokens
    assert all(torch.equal(logits_again[key], logits[key]) for key in logits)


def test_not_for_other_quantised_files(tmp_path: Path) -> None:
    model, cache = tmp_path / "model", tmp_path / "cache"
    model.mkdir()
    write_quantized(model, "gptq")
    start(model, cache)
    file = model / "config.json"
    config = json.loads(file.read_text())
    # Zero points are read otherwise in the second format.
    config["quantization_config"]["checkpoint_format"] = "gptq_v2"
    file.write_text(json.dumps(config))
    assert record_of(model, cache).restore() is None


@pytest.mark.parametrize("is_changed", [False, True])
def test_not_without_the_blocks_of_a_gguf_file(
    is_changed: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, cache = Path(gguf_model(tmp_path, monkeypatch)), tmp_path / "cache"
    start(model, cache, quantization="gguf")
    blocks = _file_beside(Path(find_source(model).files))
    if is_changed:
        tensors = load_file(blocks)
        save_file(tensors, blocks, {"format": "pt"})
    else:
        blocks.unlink()
    assert record_of(model, cache, quantization="gguf").restore() is None


def test_no_record_of_quantised_weights_that_are_not_the_files(tmp_path: Path) -> None:
    model, cache = tmp_path / "model", tmp_path / "cache"
    model.mkdir()
    write_quantized(model, "awq")
    loaded = load_model(model)
    specs = probe_model(loaded)
    record = record_of(model, cache)
    assert record.describe(loaded, specs) is not None
    weight = next(weight for weight in loaded.quantized.values() if weight is not None)
    weight.scales[3, 0] *= 2
    assert record.describe(loaded, specs) is None


def test_the_newest_records_are_kept(
    tmp_path: Path, started: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(start_record, "_MAX_RECORDS", 2)
    model, folder = started[0], tmp_path / "starts"
    folder.mkdir()
    for age in (1, 2, 3):
        old = folder / f"{age}.json"
        old.write_text("{}")
        os.utime(old, ns=(10 - age, 10 - age))
    loaded = load_model(model)
    record = record_of(model, tmp_path)
    record.write(record.describe(loaded, probe_model(loaded)), "a graph")
    # The new record's name is a digest, which any name may come before or after.
    left = {file.name for file in folder.iterdir()}
    assert len(left) == 2
    assert left & {"1.json", "2.json", "3.json"} == {"1.json"}


_PROGRAM = """
import json, sys
from pagespec import LLM, SamplingParams
logits = []
keep = lambda _, x: logits.append(x.sum().item())
quantization = sys.argv[2] or None
llm = LLM(sys.argv[1], device="cpu", num_blocks=16, on_logits=keep, quantization=quantization)
(out,) = llm.generate([[3, 5, 8]], SamplingParams(temperature=0.0, max_tokens=6), use_tqdm=False)
print(json.dumps([list(out.outputs[0].token_ids), logits, llm.stats().startup_s["probe"],
                  sorted(sys.modules)]))
"""


@pytest.mark.parametrize("quantization", ["", pytest.param("fp8", marks=pytest.mark.nightly)])
def test_the_second_start_imports_nothing_that_it_does_not_need(
    quantization: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PAGESPEC_CACHE", str(tmp_path / "cache"))
    tiny_model("llama", num_hidden_layers=1).save_pretrained(tmp_path / "model")
    byte_level().save_pretrained(tmp_path / "model")
    first, second = (
        json.loads(run_apart("-c", _PROGRAM, str(tmp_path / "model"), quantization))
        for _ in range(2)
    )
    assert second[:2] == first[:2]
    assert "transformers.modeling_utils" in first[3]
    imported = set(second[3])
    heavy = imported & set(HEAVY)
    assert not heavy
    assert len(imported) < 2000, "2,900 with the module"


@pytest.mark.parametrize(
    ("arch", "settings"),
    [
        ("qwen3_moe", {}),
        # With a merged weight of 105 outputs, and padding.
        (
            "qwen2_moe",
            {
                "num_experts": 8,
                "moe_intermediate_size": 32,
                "shared_expert_intermediate_size": 48,
            },
        ),
    ],
)
def test_experts_are_restored_in_a_process_that_knows_no_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arch: str, settings: dict[str, int]
) -> None:
    """Their operation is not torch's own; without a record, a model's module would have registered
    it."""
    monkeypatch.setenv("PAGESPEC_CACHE", str(tmp_path / "cache"))
    tiny_model(arch, num_hidden_layers=1, **settings).save_pretrained(tmp_path / "model")
    first, second = (
        json.loads(run_apart("-c", _PROGRAM, str(tmp_path / "model"), "")) for _ in range(2)
    )
    assert second[:2] == first[:2]
    assert "transformers.modeling_utils" in first[3]
    assert "transformers.modeling_utils" not in second[3]


def test_a_restored_start_names_the_ignored_settings_too(tmp_path: Path) -> None:
    folder, cache = tmp_path / "model", tmp_path / "cache"
    tiny_model("llama", num_hidden_layers=1).save_pretrained(folder)
    (folder / "generation_config.json").write_text('{"suppress_tokens": [3]}')
    start(folder, cache)
    restored = record_of(folder, cache).restore()
    assert restored is not None
    assert restored.loaded.ignored_settings == ["suppress_tokens"]
