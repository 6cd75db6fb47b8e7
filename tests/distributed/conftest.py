"""A tiny model in a folder, and a two-rank engine that all tests of a module share."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.distributed.rank_group import Group, assert_gone
from tests.support.models import tiny_model


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    tiny_model("qwen3").save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def group(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Group]:
    group = Group(folder, tmp_path_factory.mktemp("traces"))
    yield group
    group.drop()
    assert_gone(group.pids)
