"""Matmul recipes of a CPU are measured once per shape, processor and library."""

from __future__ import annotations

import json
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

from pagespec.kernels.matmul.cpu import invariant, recipe_cache
from pagespec.kernels.matmul.cpu.invariant import MatmulRecipe
from pagespec.kernels.matmul.cpu.recipe_cache import Recipes


@pytest.fixture
def tried(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[Any]:
    """The shapes that were measured, on a processor with a given name."""
    info = tmp_path / "cpuinfo"
    info.write_text("model name: one\ncpu MHz: 1\nflags: avx2\n\nmodel name: another\n")
    monkeypatch.setattr(recipe_cache, "_CPU_INFO", info)
    SHAPES.clear()
    return SHAPES


SHAPES: list[tuple[int, bool]] = []


def choose(recipes: Recipes, num_outputs: int = 8, may_pack: bool = False) -> MatmulRecipe:
    def try_out() -> MatmulRecipe:
        SHAPES.append((num_outputs, may_pack))
        return MatmulRecipe("onednn", 2, is_packed=may_pack)

    return recipes.find(MatmulRecipe("mkl", 1), f"{num_outputs} {may_pack}", try_out)


def test_the_next_process_finds_them(tried: list[Any], tmp_path: Path) -> None:
    folder = tmp_path / "linear"
    first = Recipes(folder)
    found = [choose(first), choose(first, may_pack=True), choose(first, 16), choose(first)]
    assert len(tried) == 3
    second = Recipes(folder)
    again = [choose(second), choose(second, may_pack=True), choose(second, 16), choose(second)]
    assert again == found
    assert len(tried) == 3
    choose(second, 32)
    assert len(tried) == 4


def test_without_a_folder_each_tries(tried: list[Any]) -> None:
    assert choose(Recipes()) == choose(Recipes())
    assert len(tried) == 2


def test_a_clock_does_not_matter_and_a_processor_does(tried: list[Any], tmp_path: Path) -> None:
    info, folder = tmp_path / "cpuinfo", tmp_path / "linear"
    choose(Recipes(folder))
    info.write_text(info.read_text().replace("MHz: 1", "MHz: 2").replace("another", "a third"))
    choose(Recipes(folder))
    assert len(tried) == 1
    info.write_text(info.read_text().replace("avx2", "avx512f"))
    choose(Recipes(folder))
    assert len(tried) == 2
    info.unlink()
    choose(Recipes(folder))
    choose(Recipes(folder))
    assert len(tried) == 4


def test_threads_and_settings_matter(
    tried: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "linear"
    choose(Recipes(folder))
    monkeypatch.setenv("MKL_CBWR", "AVX2")
    choose(Recipes(folder))
    before = torch.get_num_threads()
    torch.set_num_threads(before + 1)
    try:
        choose(Recipes(folder))
    finally:
        torch.set_num_threads(before)
    assert len(tried) == 3


def test_of_threads_those_matter_that_are_tried(tried: list[Any], tmp_path: Path) -> None:
    """A machine that is busy at one start and idle at the next measures once."""
    folder, before = tmp_path / "linear", torch.get_num_threads()
    for number in (2, 1):
        torch.set_num_threads(number)
        try:
            choose(Recipes(folder, (2, 1)))
        finally:
            torch.set_num_threads(before)
    assert len(tried) == 1
    choose(Recipes(folder, (4, 2, 1)))
    choose(Recipes(folder, (2,)))
    choose(Recipes(folder, (1,)))
    assert len(tried) == 4
    choose(Recipes(folder, (2,)))
    assert len(tried) == 4


@pytest.mark.parametrize(
    "content",
    ["", "{", "[]", '{"8 False": 5}', "of other recipes", "of more fields"],
)
def test_what_is_damaged_is_tried_anew(tried: list[Any], tmp_path: Path, content: str) -> None:
    folder = tmp_path / "linear"
    expected = choose(Recipes(folder))
    (file,) = folder.iterdir()
    if content == "of other recipes":
        content = json.dumps(
            {key: ["mkl", 0, 0, True, True] for key in json.loads(file.read_text())}
        )
    elif content == "of more fields":
        content = json.dumps({key: [*v, 1] for key, v in json.loads(file.read_text()).items()})
    file.write_text(content)
    assert choose(Recipes(folder)) == expected
    assert len(tried) == 2


def test_a_recipe_is_that_of_a_trial_and_kept_for_its_arguments(tried: Any, tmp_path: Path) -> None:
    folder, threads = tmp_path / "linear", (1,)
    recipes = Recipes(folder, threads)
    for sizes in product((8, 16), (4, 40), (torch.float32, torch.bfloat16)):
        for is_contiguous, may_pack in product((True, False), repeat=2):
            given = {"is_contiguous": is_contiguous, "may_pack": may_pack}
            expected = invariant.choose_recipe(*sizes, **given, threads=threads)
            assert recipes.choose(*sizes, **given) == expected
    (file,) = folder.iterdir()
    assert len(json.loads(file.read_text())) == 2**5
