"""Quantised blocks of a GGUF file for the parameters made from it, and their disk cache."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType, GGUFWriter
from gguf.quants import dequantize

from pagespec.compile.load import gguf_blocks
from pagespec.kernels.matmul.quantized.quantized_weight import Int4Weight, Int8Weight
from tests.support.gguf_files import write_model


@pytest.mark.parametrize("format", ["Q4_0", "Q4_1", "Q8_0"])
@pytest.mark.parametrize("head", ["Q8_0", "Q5_1"])
def test_blocks_hold_the_values_of_their_parameters(tmp_path: Path, format: str, head: str) -> None:
    model = write_model(tmp_path / "a.gguf", format, head)
    found = gguf_blocks.read_blocks(tmp_path / "a.gguf", model)
    wide = {name for name, blocks in found.items() if blocks is None}
    heads = {"model.embed_tokens.weight", "lm_head.weight"}
    assert wide == (heads if head == "Q5_1" else set())
    assert len(found) == 2 * 7 + 2
    for name, parameter in model.named_parameters():
        blocks = found.get(name)
        if blocks is not None:
            assert isinstance(blocks, Int8Weight) == ("Q8_0" in (head if name in heads else format))
            assert torch.equal(values_of(blocks), parameter)


def values_of(blocks: Int4Weight | Int8Weight) -> torch.Tensor:
    scales = blocks.scales[..., None]
    if isinstance(blocks, Int8Weight):
        return (blocks.values.unflatten(1, (-1, 32)) * scales).flatten(1)
    values = blocks.unpacked().unflatten(1, (-1, 32))
    return (values * scales + blocks.minima[..., None]).flatten(1)


def test_blocks_of_256_values(tmp_path: Path) -> None:
    """Q4_K blocks of random bytes; the gguf package reads the format but does not write it."""
    rng = np.random.default_rng(0)
    data = rng.integers(0, 256, (48, 2 * 144), dtype=np.uint8)
    numbers = rng.normal(size=(48, 2, 2)).astype(np.float16)
    data.reshape(48, 2, 144)[..., :4] = numbers.view(np.uint8).reshape(48, 2, 4)
    writer = GGUFWriter(tmp_path / "a.gguf", "llama")
    writer.add_tensor("tensor", data, raw_dtype=GGMLQuantizationType.Q4_K)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    layer = torch.nn.Linear(512, 48, bias=False)
    expected = torch.from_numpy(dequantize(data, GGMLQuantizationType.Q4_K))
    with torch.no_grad():
        layer.weight.copy_(expected)
    blocks = gguf_blocks.read_blocks(tmp_path / "a.gguf", layer)["weight"]
    assert isinstance(blocks, Int4Weight)
    assert torch.equal(values_of(blocks), expected)


def test_what_is_not_found_stays(tmp_path: Path) -> None:
    model = write_model(tmp_path / "a.gguf")
    changed = model.model.layers[0].mlp
    with torch.no_grad():
        changed.up_proj.weight[-1, -1] += 1
        changed.gate_proj.weight[0, 0] += 1
    found = gguf_blocks.read_blocks(tmp_path / "a.gguf", model)
    assert len(found) == 2 * 7
    assert not any("layers.0.mlp.up" in name or "layers.0.mlp.gate" in name for name in found)


def test_read_once_and_again_if_damaged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, folder = tmp_path / "a.gguf", tmp_path / "cache" / "converted"
    model = write_model(path)
    first = gguf_blocks.kept_blocks(path, folder, model)
    [file] = folder.parent.iterdir()
    with monkeypatch.context() as patch:
        patch.setattr(gguf_blocks, "read_blocks", lambda *_: {})
        again = gguf_blocks.kept_blocks(path, folder, model)
    assert again.keys() == first.keys()
    for name, blocks in first.items():
        kept = again[name]
        assert (blocks is None) == (kept is None)
        if blocks is not None and kept is not None:
            assert all(torch.equal(a, b) for a, b in zip(blocks, kept, strict=True))
    for content in (b"", bytes(99), file.read_bytes()[:-9]):
        file.write_bytes(content)
        assert gguf_blocks.kept_blocks(path, folder, model).keys() == first.keys()
