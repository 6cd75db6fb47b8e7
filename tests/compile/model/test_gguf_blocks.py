"""Blocks of a GGUF file for the parameters made from it, and their cache on the disk."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from pagespec.compile.model import gguf_blocks
from tests.support.gguf_files import write_model


@pytest.mark.parametrize("format", ["Q4_0", "Q4_1"])
def test_blocks_hold_the_values_of_their_parameters(tmp_path: Path, format: str) -> None:
    model = write_model(tmp_path / "a.gguf", format)
    found = gguf_blocks.read_blocks(tmp_path / "a.gguf", model)
    wide = {name for name, blocks in found.items() if blocks is None}
    assert wide == {"model.embed_tokens.weight", "lm_head.weight"}
    assert len(found) == 2 * 7 + 2
    for name, parameter in model.named_parameters():
        blocks = found.get(name)
        if blocks is not None:
            values = blocks.unpacked().float().unflatten(1, (-1, 32)) - 8
            weight = values * blocks.scales[..., None] + blocks.zeros[..., None]
            assert torch.allclose(weight.flatten(1), parameter, rtol=0, atol=1e-5)


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
