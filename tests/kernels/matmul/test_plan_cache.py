"""Matmul plans are measured once per shape, stored on disk, and reused only if they are valid."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")
linear_plans = pytest.importorskip("pagespec.kernels.matmul.plan_cache")


@pytest.fixture
def sweeps(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """The shapes that were swept."""
    seen: list[tuple[int, ...]] = []

    def choose_plan(weight: torch.Tensor, bias: torch.Tensor | None, _has_gate: bool) -> int:
        seen.append(tuple(weight.shape))
        return 17 + (bias is not None)

    monkeypatch.setattr(linear_plans.plan, "choose_plan", choose_plan)
    return seen


def test_each_shape_is_swept_once_and_kept(tmp_path: Path, sweeps: list[tuple[int, ...]]) -> None:
    first, second = torch.zeros(6, 4), torch.zeros(8, 4)
    for _ in range(2):
        plans = linear_plans.LinearPlans(True, tmp_path / "new")
        assert plans.max_custom_rows(first, None, False) == 17
        assert plans.max_custom_rows(first, torch.zeros(6), False) == 18
        assert plans.max_custom_rows(second, None, False) == 17
        assert plans.max_custom_rows(first, None, False) == 17
        assert plans.max_custom_rows(first, None, True) == 17
    assert sweeps == [(6, 4), (6, 4), (8, 4), (6, 4)]


def test_nothing_is_kept_without_a_folder(sweeps: list[tuple[int, ...]]) -> None:
    for _ in range(2):
        assert linear_plans.LinearPlans(True).max_custom_rows(torch.zeros(6, 4), None, False) == 17
    assert len(sweeps) == 2


def test_without_transparency_nothing_is_swept(sweeps: list[tuple[int, ...]]) -> None:
    assert linear_plans.LinearPlans(False).max_custom_rows(torch.zeros(6, 4), None, False) == 64
    assert sweeps == []


@pytest.mark.parametrize("content", ["", "[1]", '{"6x4 torch.float32 plain": "many"}', "{"])
def test_a_damaged_file_is_swept_anew(
    tmp_path: Path, sweeps: list[tuple[int, ...]], content: str
) -> None:
    weight = torch.zeros(6, 4)
    linear_plans.LinearPlans(True, tmp_path).max_custom_rows(weight, None, False)
    (file,) = tmp_path.iterdir()
    file.write_text(content)
    assert linear_plans.LinearPlans(True, tmp_path).max_custom_rows(weight, None, False) == 17
    assert len(sweeps) == 2


def test_another_library_has_another_file(
    tmp_path: Path, sweeps: list[tuple[int, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    linear_plans.LinearPlans(True, tmp_path).max_custom_rows(torch.zeros(6, 4), None, False)
    monkeypatch.setattr(torch, "__version__", "9.9")
    linear_plans.LinearPlans(True, tmp_path).max_custom_rows(torch.zeros(6, 4), None, False)
    assert len(sweeps) == 2
    assert len(list(tmp_path.iterdir())) == 2


def test_what_sweeps_of_new_shapes_launch_is_asked_for_before(
    tmp_path: Path, sweeps: list[tuple[int, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[int, tuple[int, ...]]] = []
    monkeypatch.setattr(
        linear_plans.gpu_linear, "linear", lambda x, w, *_: asked.append((len(x), tuple(w.shape)))
    )
    known, new = (torch.zeros(n, 128, dtype=torch.bfloat16) for n in (64, 256))
    linear_plans.LinearPlans(True, tmp_path).max_custom_rows(known, None, False)
    # float32 has one tile, so that it needs no sweep.
    products = [(weight, None, False) for weight in (known, new, new, torch.zeros(64, 128))]
    linear_plans.LinearPlans(True, tmp_path).prepare(products)
    assert asked == [(n, (256, 128)) for n in linear_plans.plan.SWEEP_ROWS if n <= 64]
    asked.clear()
    linear_plans.LinearPlans(False, tmp_path).prepare(products)
    assert asked == []
    assert sweeps == [(64, 128)]
