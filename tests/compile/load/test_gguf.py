"""The cache of converted GGUF files: damaged and leftover entries."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from pagespec.compile.load import gguf
from pagespec.compile.load.gguf import converted_folder
from pagespec.compile.load.load import load_model
from tests.support.models import tiny_model

WEIGHTS = "model.safetensors"


@pytest.fixture
def converted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """A list with one folder per conversion; each conversion gives the same tiny model."""
    made: list[Path] = []

    def convert(path: Path, folder: Path) -> None:
        if path.name == "large.gguf":
            raise OSError(28, "No space left on device")
        made.append(folder)
        tiny_model("llama").save_pretrained(folder)
        words = Tokenizer(models.WordLevel({"<unk>": 0, "a": 1}, unk_token="<unk>"))
        PreTrainedTokenizerFast(tokenizer_object=words).save_pretrained(folder)

    monkeypatch.setattr(gguf, "_convert", convert)
    (tmp_path / "tiny.gguf").write_bytes(b"GGUF")
    return made


def _cut(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-100])


def _zero(file: Path) -> None:
    file.write_bytes(bytes(file.stat().st_size))


def _empty(file: Path) -> None:
    file.write_bytes(b"")


@pytest.mark.parametrize("damage", [_cut, _zero, _empty, Path.unlink])
@pytest.mark.parametrize("name", [WEIGHTS, "config.json", "tokenizer.json", "manifest.json"])
def test_a_damaged_conversion_is_made_again(
    tmp_path: Path, converted: list[Path], name: str, damage: Callable[[Path], None]
) -> None:
    path, cache = tmp_path / "tiny.gguf", tmp_path / "cache"
    folder = converted_folder(path, cache)
    damage(folder / name)
    for _ in range(2):
        loaded = load_model(path, cache_dir=cache)
        assert loaded.tokenizer is not None
        assert len(converted) == 2
    assert list(folder.parent.iterdir()) == [folder]


def test_a_whole_conversion_is_kept(tmp_path: Path, converted: list[Path]) -> None:
    for _ in range(3):
        load_model(tmp_path / "tiny.gguf", cache_dir=tmp_path / "cache")
    assert len(converted) == 1


def test_a_killed_conversion_is_cleared_away_by_the_next(
    tmp_path: Path, converted: list[Path]
) -> None:
    code = (
        "import os, signal, sys\n"
        "from pathlib import Path\n"
        "from pagespec.compile.load import gguf\n"
        "def convert(path, folder):\n"
        "    (folder / 'half').write_bytes(bytes(9))\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
        "gguf._convert = convert\n"
        "gguf.find_spec = lambda name: name\n"
        "gguf.converted_folder(Path(sys.argv[1]), sys.argv[2])\n"
    )
    path, cache = tmp_path / "tiny.gguf", tmp_path / "cache"
    result = subprocess.run([sys.executable, "-c", code, path, cache], check=False, timeout=100)
    assert result.returncode == -signal.SIGKILL
    [left] = (cache / "gguf").iterdir()
    folder = converted_folder(path, cache)
    assert not left.exists()
    assert list(folder.parent.iterdir()) == [folder]


def test_a_conversion_that_runs_is_left_alone(tmp_path: Path, converted: list[Path]) -> None:
    """Also one without a lock so far, unless it is old."""
    from pagespec.disk_cache import work_folder

    path, parent = tmp_path / "tiny.gguf", tmp_path / "cache" / "gguf"
    unlocked, old = parent / ".converting-new", parent / ".converting-old"
    for folder in (unlocked, old):
        folder.mkdir(parents=True)
    os.utime(old, (0, time.time() - 2 * 24 * 3600))
    with work_folder(parent, ".converting-") as running:
        target = converted_folder(path, tmp_path / "cache")
        assert running.exists()
        assert sorted(parent.iterdir()) == sorted([running, unlocked, target])
    assert not running.exists()


@pytest.mark.usefixtures("converted")
def test_a_conversion_that_fails_leaves_nothing(tmp_path: Path) -> None:
    file = (tmp_path / "tiny.gguf").rename(tmp_path / "large.gguf")
    with pytest.raises(OSError, match="No space left"):
        converted_folder(file, tmp_path / "cache")
    assert list((tmp_path / "cache" / "gguf").iterdir()) == []
