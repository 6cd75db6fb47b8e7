"""A model that is too big is refused before anything is allocated."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from pagespec import LLM
from pagespec.compile.load.source import ModelSource
from pagespec.engine.config import EngineConfig
from pagespec.errors import InvalidInputError
from pagespec.runner import weight_budget
from pagespec.runner.weight_budget import check_weights_fit
from tests.compile.load.gguf_models import write_whole
from tests.support.models import tiny_model

CPU, GPU = torch.device("cpu"), torch.device("cuda:0")
LLAMA_70B = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 8192,
    "intermediate_size": 28672,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "dtype": "bfloat16",
}
NUM_ELEMENTS = 70_553_706_496


@pytest.fixture
def large(tmp_path: Path) -> ModelSource:
    """A config without weights."""
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_70B))
    return ModelSource(str(tmp_path), str(tmp_path))


def set_free(monkeypatch: pytest.MonkeyPatch, num_bytes: int) -> None:
    monkeypatch.setattr(weight_budget, "available_bytes", lambda: num_bytes)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (num_bytes, 2 * num_bytes))


@pytest.mark.parametrize(
    ("arguments", "devices", "num_bytes", "form"),
    [
        ({}, [CPU], 4 * NUM_ELEMENTS, "float32"),
        ({"dtype": "bfloat16"}, [CPU], 2 * NUM_ELEMENTS, "bfloat16"),
        ({"quantization": "fp8"}, [CPU], NUM_ELEMENTS, "fp8"),
        ({}, [CPU, CPU], 4 * NUM_ELEMENTS, "float32"),  # each rank has its slices alone
        ({}, [GPU], 2 * NUM_ELEMENTS, "bfloat16"),
        ({"dtype": "float32"}, [GPU], 4 * NUM_ELEMENTS, "float32"),
        ({}, [GPU] * 4, NUM_ELEMENTS // 2, "bfloat16"),
    ],
)
def test_random_weights_are_counted_by_the_config(
    large: ModelSource,
    arguments: dict[str, str],
    devices: list[torch.device],
    num_bytes: int,
    form: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    config = EngineConfig(load_format="dummy", **arguments)
    set_free(monkeypatch, num_bytes)
    check_weights_fit(large, config, devices)
    set_free(monkeypatch, num_bytes - 1)
    with pytest.raises(InvalidInputError) as caught:
        check_weights_fit(large, config, devices)
    place = "available" if devices[0] == CPU else "free on cuda:0"
    size = f"{num_bytes / (1 << 30):.1f} GiB"
    assert f"take {size} in {form}, more than the {size} {place}" in str(caught.value)


def test_an_engine_of_a_model_too_big_is_not_built(large: ModelSource) -> None:
    with pytest.raises(InvalidInputError, match=r"take 262\.8 GiB in float32, more than the"):
        LLM(large.name, load_format="dummy")


def test_weights_of_files_are_counted_in_the_engines_dtype(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny_model("qwen2").to(torch.bfloat16)
    model.save_pretrained(tmp_path)
    source = ModelSource(str(tmp_path), str(tmp_path))
    num_elements = sum(parameter.numel() for parameter in model.parameters())
    set_free(monkeypatch, 4 * num_elements - 1)
    with pytest.raises(InvalidInputError, match="in float32, more than the"):
        check_weights_fit(source, EngineConfig(), [CPU])
    check_weights_fit(source, EngineConfig(dtype="bfloat16"), [CPU])
    # In the file's dtype they stay in the memory of the file.
    set_free(monkeypatch, 0)
    check_weights_fit(source, EngineConfig(dtype="bfloat16"), [CPU])
    # Several ranks copy their slices.
    with pytest.raises(InvalidInputError, match="in bfloat16, more than the"):
        check_weights_fit(source, EngineConfig(dtype="bfloat16"), [CPU, CPU])
    # Of several GPUs each holds a part.
    set_free(monkeypatch, num_elements)
    check_weights_fit(source, EngineConfig(), [GPU, torch.device("cuda:1")])
    set_free(monkeypatch, num_elements - 1)
    with pytest.raises(InvalidInputError, match="the weights of one rank take"):
        check_weights_fit(source, EngineConfig(), [GPU, torch.device("cuda:1")])


def test_files_that_are_damaged_are_left_to_the_loader(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiny_model("qwen2").save_pretrained(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"nothing")
    set_free(monkeypatch, 0)
    check_weights_fit(ModelSource(str(tmp_path), str(tmp_path)), EngineConfig(), [CPU])


def test_a_conversion_too_big_is_not_begun(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PAGESPEC_CACHE", str(tmp_path / "cache"))
    write_whole(tmp_path / "tiny.gguf")
    set_free(monkeypatch, 1000)
    with pytest.raises(InvalidInputError, match=r"its conversion to float32 takes 0\.0 GiB"):
        LLM(tmp_path / "tiny.gguf")
    assert not list((tmp_path / "cache" / "gguf").glob("*"))
