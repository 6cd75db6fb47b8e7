"""Norm, rotation, cache write and attention in one launch have the bits of two launches.

Also tests the facts about the compiled kernels on which this depends. `tests/conftest.py` enables
Triton's interpreter if there is no GPU. With a GPU, this file is not collected, and
test_decode_prologue_gpu.py runs the same tests.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import triton

from pagespec.kernels.arguments import RopeInputs
from pagespec.kernels.attention import decode_prologue, triton_backend
from pagespec.kernels.attention.tiling import choose_tiling
from pagespec.kernels.attention.triton_backend import TritonBackend
from tests.kernels.attention.rope_prologue import Case, same_bits
from tests.kernels.attention.test_decode import SMALL, shuffled
from tests.kernels.attention.test_decode import SPREADS as OF_PAGED
from tests.support.apart import by_day_and_night, run_apart
from tests.support.paged import Rows, Shape

pytestmark = pytest.mark.usefixtures("poisoned", "ordered_dot")

SPREADS = OF_PAGED | {"three lanes": {"max_programs": 60}}
ROWS: dict[str, Rows] = {
    # The first context; the last slot and the first of a block, of splits, of split_change.
    "decode": [(0, 1), (15, 1), (16, 1), (62, 1), (63, 1), (64, 1), (100, 1)],
    # As many tokens as rows or fewer, yet not one a row.
    "several a row": [(5, 1), (0, 0), (29, 7), (60, 3), (0, 1), *[(0, 0)] * 8],
    "a prompt": [(7, 20), *[(0, 0)] * 19],
}
SHAPES = [
    Shape(hq=2, hkv=2, dk=64, dv=64),
    Shape(hq=4, hkv=2, dk=128, dv=128, block_size=64, window=40, softcap=3.0, has_sinks=True),
    Shape(hq=4, hkv=1, dk=64, dv=64, window=7, dtype=torch.float16),
    Shape(hq=5, hkv=1, dk=96, dv=32, softcap=2.0),
]


# By day every spread with the last shape, which has no window, and a third of them with each other.
@pytest.mark.parametrize(
    ("shape", "spread"),
    [
        pytest.param(
            shape,
            spread,
            marks=() if shape is SHAPES[-1] or (i + j) % 3 == 0 else pytest.mark.nightly,
        )
        for i, shape in enumerate(SHAPES)
        for j, spread in enumerate(SPREADS)
    ],
    ids=str,
)
def test_decode(shape: Shape, spread: str) -> None:
    Case(shape, ROWS["decode"]).check(replace(SMALL, **SPREADS[spread]))


@pytest.mark.parametrize("spread", ["a program a piece", "three lanes"])
@pytest.mark.parametrize("rows", ["several a row", "a prompt"])
def test_rows_of_several_tokens(rows: str, spread: str) -> None:
    """Each program stores what it reads, in whatever order they run."""
    with shuffled(0):
        Case(SHAPES[2], ROWS[rows], num_padding=1).check(replace(SMALL, **SPREADS[spread]))


@pytest.mark.parametrize("form", ["", "rounded", "wide", "plus_one"])
@pytest.mark.parametrize(("rotary_dim", "half_tables"), [(0, True), (16, False)])
def test_forms(rotary_dim: int, half_tables: bool, form: str) -> None:
    shape = Shape(hq=4, hkv=2, dk=64, dv=64, dtype=torch.float16)
    rows = [(0, 1), (40, 1), (80, 1)]
    case = Case(shape, rows, rotary_dim=rotary_dim, half_tables=half_tables, form=form)
    case.check(replace(SMALL, max_programs=30))


def test_the_real_tiling() -> None:
    shape = Shape(hq=4, hkv=2, dk=64, dv=64, dtype=torch.float16)
    rows = [(63, 1), (64, 1), (128, 1), (700, 1)]
    Case(shape, rows).check(choose_tiling(shape.dtype, 64, 64))


def test_any_order_of_programs() -> None:
    """Programs of other tokens and pieces may run before or after the one that stores."""
    case = Case(SHAPES[2], ROWS["decode"], num_padding=1)
    for seed in range(2):
        with shuffled(seed):
            case.check(replace(SMALL, max_programs=64))


def test_shared_blocks() -> None:
    """Rows that share full blocks write only their own blocks and read the same values."""
    case = Case(SHAPES[0], [(32, 1), (40, 1), (33, 1)], num_padding=1)
    tables, table_rows = case.layout[2:4]
    tables[table_rows[1:], :2] = tables[table_rows[0], :2]
    for seed in range(2):
        with shuffled(seed):
            case.check(SMALL)


def test_bfloat16_is_rounded_as_by_two_launches() -> None:
    """The interpreter cannot multiply bfloat16; only stored values, which need no matmul, count."""
    shape = Shape(hq=16, hkv=2, dk=64, dv=64, dtype=torch.bfloat16)
    for form in ("", "rounded", "plus_one"):
        case = Case(shape, [(0, 1), (20, 1)], num_padding=0, form=form)
        expected, found = case.two(SMALL), case.one(tiling=SMALL)
        assert same_bits(found[1], expected[1])
        assert same_bits(found[2], expected[2])


def test_refuses_what_it_cannot_serve() -> None:
    case = Case(SHAPES[0], [(0, 2), (3, 1)], num_padding=0)
    with pytest.raises(ValueError, match="tokens of 2 rows"):
        case.one(tiling=SMALL)


@pytest.fixture
def note_launches(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[str]]:
    """Records the kernels that an engine launches; calls ``instead``, if given."""

    def note(instead: Callable[..., object] | None = None) -> list[str]:
        calls: list[str] = []

        def call(*args: object, name: str, function: Callable[..., object], **more: object) -> Any:
            calls.append(name)
            return function(*args, **more)

        for name in ("norm_rope_store", "paged_attention", "fused_rope_attention"):
            function = instead or getattr(triton_backend, name)
            noted = partial(call, name=name, function=function)
            monkeypatch.setattr(triton_backend, name, noted)
        return calls

    return note


@pytest.mark.parametrize(
    ("num_rows", "dtype", "num_launches"),
    [
        (3, torch.float16, 1),
        (3, torch.float32, 2),
        pytest.param(64, torch.float16, 1, marks=pytest.mark.nightly),
        pytest.param(65, torch.float16, 2, marks=pytest.mark.nightly),
    ],
)
def test_an_engine_joins_small_decode_steps(
    num_rows: int, dtype: torch.dtype, num_launches: int, note_launches: Callable[..., list[str]]
) -> None:
    calls = note_launches()
    shape = Shape(hq=2, hkv=1, dk=32, dv=32, dtype=dtype)
    case = Case(shape, [(3, 1)] * num_rows, num_padding=0, form="")
    case.check(call=TritonBackend().fused_rope_attention)
    assert len(calls) == num_launches
    # Rows of several tokens, or fewer tokens than rows: the shapes of a mixed step.
    calls.clear()
    mixed = Case(shape, [(3, 2), (0, 0), (5, 1), (0, 0)], num_padding=0, form="")
    mixed.check(call=TritonBackend().fused_rope_attention)
    assert calls == ["norm_rope_store", "paged_attention"]


@pytest.mark.parametrize(
    ("num_rows", "launched"),
    [(64, ["fused_rope_attention"]), (65, ["norm_rope_store", "paged_attention"])],
)
def test_a_step_of_many_rows_is_launched_in_two(
    num_rows: int, launched: list[str], note_launches: Callable[..., list[str]]
) -> None:
    """Which kernels are launched; to interpret them for so many rows takes seconds."""

    def query_of(given: RopeInputs | torch.Tensor, *_: object, **__: object) -> torch.Tensor:
        return given.query if isinstance(given, RopeInputs) else given

    calls = note_launches(query_of)
    shape = Shape(hq=2, hkv=1, dk=32, dv=32, dtype=torch.float16)
    case = Case(shape, [(3, 1)] * num_rows, num_padding=0, form="")
    case.one(call=TritonBackend().fused_rope_attention)
    assert calls == launched


def test_one_launch_only_where_squares_are_added_up_alike() -> None:
    def fits(heads: tuple[int, int], dim: int, has_norm: bool = True, width: int = 0) -> bool:
        query, key = (torch.empty(2, n, width or dim, dtype=torch.bfloat16) for n in heads)
        return decode_prologue.fits(*(x[..., :dim] for x in (query, key, key)), has_norm)

    assert fits((16, 8), 128)
    assert fits((32, 8), 128)
    assert fits((8, 4), 256)
    assert fits((16, 8), 64)
    assert not fits((4, 2), 64)  # 256 elements: fewer than 8 a thread
    assert fits((4, 2), 64, has_norm=False)
    assert not fits((16, 8), 128, width=132)  # strides that do not allow 16 bytes at once
    assert not decode_prologue.fits(torch.empty(2, 16, 128), *torch.empty(2, 2, 8, 128), False)
    # Quantised outputs of 16 heads a KV head, or of 256 values, would be stored 16 at once.
    for heads, dim in (((16, 8), 128), ((32, 8), 128), ((8, 4), 256), ((128, 8), 128)):
        query, key = (torch.empty(2, n, dim, dtype=torch.bfloat16) for n in heads)
        for are_planes in (False, True):
            assert decode_prologue.fits(query, key, key, True, are_planes)
            found = decode_prologue.fits(query, key, key, True, are_planes, quantizes=True)
            assert found is (dim == 128 and heads[0] <= 64)


COMPILED = [
    {"hq": 32, "hkv": 8, "dim": 128, "window": False, "softcap": True},
    {"hq": 16, "hkv": 8, "dim": 64, "window": True, "softcap": False},
]


@pytest.mark.parametrize("cases", by_day_and_night(COMPILED, 0))
def test_its_bits_do_not_depend_on_the_compiler(cases: list[dict[str, Any]]) -> None:
    """Compiled for Hopper, which needs no GPU: contraction changes no instruction of attention, so
    the one launch may be compiled without; and the squares of a norm are added up in one order."""
    program = Path(__file__).with_name("compile_decode_prologue.py")
    printed = run_apart(str(program), json.dumps(cases))
    for case, built in zip(cases, json.loads(printed.splitlines()[-1]), strict=True):
        # Where heads have 128 values also with outputs quantised, which takes more of them.
        with_contraction, without = built["contracted"][::2], built["contracted"][1::2]
        assert with_contraction == without == sorted(set(without)), case
        assert len(without) == 1 + (case["dim"] % 128 == 0)
        assert all(order == [[8, case["dim"] // 8, 1]] for order in built["squares"])
        # Bytes a thread. Newer Tritons than those in use spill a few, outside the loops.
        is_newer = tuple(map(int, triton.__version__.split(".")[:2])) > (3, 7)
        assert max(built["spilled"]) <= (16 if is_newer else 0)
