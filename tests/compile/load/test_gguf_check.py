"""GGUF files with tensors and settings that transformers does not read are rejected by name."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import gguf as library
import numpy as np
import pytest
import torch
from gguf import GGUFEndian, GGUFReader, GGUFWriter

from pagespec.compile.load import gguf
from pagespec.compile.load.gguf_vocabulary import open_gguf, quick_gguf, read_values
from pagespec.compile.load.load import load_model
from pagespec.errors import UnsupportedModelError
from tests.compile.load.gguf_models import MODELS, write_whole
from tests.support.models import tiny_model

BIAS = "blk.0.attn_output.bias"


@pytest.mark.parametrize("arch", MODELS)
def test_a_file_that_is_read_whole_is_that_model(tmp_path: Path, arch: str) -> None:
    model = write_whole(tmp_path / "a.gguf", arch)
    loaded = load_model(tmp_path / "a.gguf", cache_dir=tmp_path)
    state = loaded.module.state_dict()
    assert state.keys() == model.state_dict().keys()
    for name, tensor in model.state_dict().items():
        torch.testing.assert_close(state[name], tensor, rtol=0, atol=1e-6)


def test_a_conversion_makes_one_table_of_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """transformers alone would make one per module of the model."""
    reader, table = library.GGUFReader, library.get_tensor_name_map
    made: list[Any] = []

    def noted(*args: Any) -> Any:
        made.append(args)
        return table(*args)

    monkeypatch.setattr(library, "get_tensor_name_map", noted)
    write_whole(tmp_path / "a.gguf", "llama")
    load_model(tmp_path / "a.gguf", cache_dir=tmp_path)
    assert len(made) == 1
    assert (library.GGUFReader, library.get_tensor_name_map) == (reader, noted)


@pytest.mark.parametrize(
    ("tensors", "settings", "name"),
    [
        ({"rope_freqs.weight": np.full(8, 2.0)}, {}, "rope_freqs.weight"),
        ({BIAS: np.ones(64)}, {}, BIAS),
        ({"blk.1.ffn_up.bias": np.ones(96)}, {}, "blk.1.ffn_up.bias"),
        ({}, {"rope.scaling.type": "linear", "rope.scaling.factor": 4.0}, "rope.scaling.factor"),
        ({}, {"rope.scale_linear": 4.0}, "rope.scale_linear"),
        ({}, {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0}, "rope.scaling.type"),
        ({}, {"rope.scaling.attn_factor": 1.2}, "rope.scaling.attn_factor"),
        ({}, {"attention.sliding_window": 24}, "attention.sliding_window"),
    ],
)
def test_what_would_be_left_out_is_refused_by_name(
    tmp_path: Path, tensors: dict[str, Any], settings: dict[str, Any], name: str
) -> None:
    write_whole(tmp_path / "a.gguf", tensors=tensors, settings=settings)
    for quantization in (None, "gguf"):
        with pytest.raises(UnsupportedModelError, match=name):
            load_model(tmp_path / "a.gguf", cache_dir=tmp_path, quantization=quantization)
    assert not list((tmp_path / "gguf").iterdir())


@pytest.mark.parametrize(
    ("tensors", "settings"),
    [
        ({"rope_freqs.weight": np.ones(8)}, {}),
        ({BIAS: np.zeros(64)}, {}),
        ({}, {"rope.scaling.type": "none", "rope.scaling.factor": 4.0}),
        ({}, {"rope.scaling.type": "linear", "rope.scaling.factor": 1.0}),
        ({}, {"rope.scaling.original_context_length": 512}),
        ({}, {"attention.sliding_window": 0}),
        ({}, {"attention.sliding_window": 512}),
    ],
)
def test_what_does_nothing_may_be_left_out(
    tmp_path: Path, tensors: dict[str, Any], settings: dict[str, Any]
) -> None:
    write_whole(tmp_path / "a.gguf", tensors=tensors, settings=settings)
    load_model(tmp_path / "a.gguf", cache_dir=tmp_path)


def test_a_rotary_scale_of_some_layers_is_refused(tmp_path: Path) -> None:
    settings = {"rope.scaling.type": "linear", "rope.scaling.factor": 8.0}
    write_whole(tmp_path / "a.gguf", "gemma3", settings)
    with pytest.raises(UnsupportedModelError, match=r"rope\.scaling\.factor"):
        load_model(tmp_path / "a.gguf", cache_dir=tmp_path)


def test_a_conversion_made_without_the_check_is_not_used(tmp_path: Path) -> None:
    """Version 1 of the cache had no check."""
    path = tmp_path / "a.gguf"
    write_whole(path, tensors={BIAS: np.ones(64)})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gguf, "_CONVERSION_VERSION", 1)
        patch.setattr(gguf, "_convert", lambda _, made: tiny_model("llama").save_pretrained(made))
        load_model(path, cache_dir=tmp_path)
    with pytest.raises(UnsupportedModelError, match=BIAS):
        load_model(path, cache_dir=tmp_path)


@pytest.mark.parametrize("endian", [GGUFEndian.LITTLE, GGUFEndian.BIG])
def test_keys_are_those_that_the_library_reads(tmp_path: Path, endian: GGUFEndian) -> None:
    path = tmp_path / "a.gguf"
    writer = GGUFWriter(path, "llama", endianess=endian)
    writer.add_string("one", "é▁")
    writer.add_float32("half", 0.5)
    for name, values in {
        "texts": ["", "é▁", "a" * 300] * 400,
        "numbers": [*range(-5, 2000)],
        "scores": [0.5, -1.25] * 800,
        "switches": [True, False, True],
    }.items():
        writer.add_array(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    reader, own = GGUFReader(path), open_gguf(path)
    assert own.fields.keys() == reader.fields.keys()
    for key, field in reader.fields.items():
        value = field.contents()
        assert read_values(own, key) == (value if isinstance(value, list) else [value])
    assert read_values(own, "missing") == []


def test_conversions_in_two_threads_leave_the_package_as_it_is() -> None:
    names = library.GGUFReader, library.get_tensor_name_map
    begun = threading.Event()

    def other() -> None:
        with quick_gguf():
            begun.set()

    thread = threading.Thread(target=other)
    with quick_gguf():
        assert library.GGUFReader is not names[0]
        thread.start()
        assert not begun.wait(0.2)  # it saves the names that this block has set otherwise
    thread.join(10)
    assert begun.is_set()
    assert (library.GGUFReader, library.get_tensor_name_map) == names
