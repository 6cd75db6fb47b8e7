"""Tokenizers of GGUF files against those of an installed llama.cpp."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest

from pagespec.compile.load.gguf_expressions import PRE_TOKENIZERS
from tests.coverage.gguf_tokenizers import cases, compare
from tests.support.gguf_files import write_vocabulary
from tests.support.gguf_vocabularies import SPECIAL, USER_DEFINED, byte_level_vocabulary
from tests.support.hard_texts import hard_texts

OTHERS = ["gemma4", "llama", "llama, no space", "llama, eos and no bos"]
NUM_RANDOM_TEXTS = 120


@cache
def texts() -> list[str]:
    return list(hard_texts(NUM_RANDOM_TEXTS, extra=[*SPECIAL, *USER_DEFINED]))


@cache
def crossing_vocabulary() -> dict[str, Any]:
    """Byte-level, with merges that cross every boundary of the pre-tokenizer's expressions."""
    return byte_level_vocabulary(texts(), 4_000)


def vocabulary(name: str) -> dict[str, Any]:
    if name in OTHERS:
        return cases()[name]
    made = crossing_vocabulary()
    return made | {"keys": made["keys"] | {"tokenizer.ggml.pre": name}}


@pytest.mark.nightly
@pytest.mark.parametrize("name", [*PRE_TOKENIZERS, *OTHERS])
def test_a_vocabulary_is_read_as_llama_cpp_reads_it(name: str, tmp_path: Path) -> None:
    pytest.importorskip("llama_cpp", reason="llama-cpp-python is not installed")
    found = compare(write_vocabulary(tmp_path / "a.gguf", **vocabulary(name)), texts())
    assert found.num_texts > NUM_RANDOM_TEXTS // 2
    assert (found.ids, found.texts, found.ends) == ([], [], [])
