"""Which kernels serve which architecture; a new GPU generation needs no change of callers."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

from pagespec.compile.load.quantized_load import check_capability
from pagespec.errors import InvalidInputError
from pagespec.kernels import ops
from pagespec.kernels.arch import CPU, Arch, Implementation
from pagespec.kernels.arguments import PagedKV
from pagespec.kernels.attention import launch
from pagespec.kernels.attention.tiling import Tiling
from pagespec.kernels.device import Gpu
from pagespec.kernels.matmul import dispatch
from pagespec.kernels.registry import registry
from tests.support.paged import Shape, bundled, make_batch

HOPPER = Arch("sm90", has_gluon=True)
TOY = Arch("sm123")
OTHERS = [CPU, Arch("sm80", True), Arch("sm89", True), Arch("sm90"), Arch("sm100", True), TOY]
OF_HOPPER = [
    ("few_rows_matmul", "bfloat16"),
    ("norm_matmul", "bfloat16"),
    ("many_rows_matmul", "bfloat16"),
    ("matmul", "fp8"),
    ("gated_matmul", "fp8"),
    ("prefill_attention", ""),
    ("latent_attention", ""),
]


@pytest.mark.parametrize(("operation", "format"), OF_HOPPER)
def test_kernels_in_gluon_serve_hopper_and_no_other(operation: str, format: str) -> None:
    """On Hopper with a supported Gluon version."""
    found = registry().find(operation, format, HOPPER)
    assert found is not None
    assert all(callable(found.function(name)) for name in found.functions)
    assert all(registry().find(operation, format, arch) is not found for arch in OTHERS)


@pytest.mark.parametrize("format", ["fp8", "int4", "int8"])
def test_formats_of_weights_say_where_they_are_served(
    format: str, cuda_capability: Callable[[tuple[int, int]], None]
) -> None:
    device = torch.device("cuda:0")
    for capability in ((8, 0), (8, 9), (10, 0), (12, 0)):
        cuda_capability(capability)
        name = "sm" + "".join(map(str, capability))
        expected = f"weights in {format} are served on GPUs of sm90; this one is {name}"
        with pytest.raises(InvalidInputError, match=expected):
            check_capability(format, device)
    cuda_capability((9, 0))
    check_capability(format, device)
    check_capability(format, torch.device("cpu"))


def toy_tile(num_rows: int, *_: object) -> int | None:
    return num_rows if num_rows < 5 else None


def toy_matmul(x: Tensor, weight: Tensor, *, tile: int, has_gate: bool) -> Tensor:
    assert tile == len(x)
    assert not has_gate
    return torch.full((len(x), len(weight)), 7.0, dtype=x.dtype)


def toy_prefill(query: Tensor, kv: PagedKV, out: Tensor, *_: object) -> bool:
    assert len(kv.context_lens) == 1
    out.fill_(len(query))
    return True


def toy_decode(query: Tensor, kv: PagedKV, out: Tensor, shared: dict[str, Any], *rest: Any) -> bool:
    """Serves only rows without a window."""
    assert isinstance(rest[0], Tiling)
    out.fill_(len(kv.context_lens))
    return shared["window"] is None


class _Toy(Implementation):
    """A namespace with the functions of this file."""

    __slots__ = ()

    def function(self, name: str):  # type: ignore[no-untyped-def]
        return globals()[self.functions[name]]


FAMILY = (
    _Toy(
        "few_rows_matmul",
        "bfloat16",
        ("sm123",),
        {"choose_tile": "toy_tile", "matmul": "toy_matmul"},
    ),
    _Toy("prefill_attention", "", ("sm123",), {"launch": "toy_prefill"}),
    Implementation("weights", "fp8", ("sm123",)),
)


@pytest.fixture
def toy(as_gpu: Callable[[Gpu], None]) -> None:
    """A machine with a GPU of another generation."""
    as_gpu(Gpu(4, 99 << 10, TOY))


def test_a_new_generation_is_entries_alone(toy: None) -> None:
    x, weight = torch.ones(2, 64).bfloat16(), torch.ones(16, 64).bfloat16()
    made = make_batch([(0, 20)], Shape(dk=16, dv=16), num_padding=0)
    ops.kv_store(*made.store)
    batch = bundled(*made.attend)
    plain, attended = dispatch.linear(x, weight, None, 0), launch.paged_attention(*batch)
    with pytest.raises(InvalidInputError, match="are served on GPUs of sm90"):
        check_capability("fp8", torch.device("cuda"))
    with registry().changed(first=FAMILY):
        assert (dispatch.linear(x, weight) == 7).all()
        assert dispatch.few_rows_kernel(weight, 8, False) is None  # no tile: the one for every GPU
        assert (launch.paged_attention(*batch) == 20).all()
        check_capability("fp8", torch.device("cuda"))
        with pytest.raises(InvalidInputError, match="int4 are served on GPUs of sm90"):
            check_capability("int4", torch.device("cuda"))
    assert dispatch.few_rows_kernel(weight, 2, False) is None
    assert torch.equal(plain, x @ weight.T)
    assert torch.equal(launch.paged_attention(*batch), attended)


def test_a_new_generation_has_decode_attention_of_its_own(toy: None) -> None:
    entry = _Toy("decode_attention", "", ("sm123",), {"launch": "toy_decode"})
    made = make_batch([(19, 1), (7, 1)], Shape(dk=16, dv=16), num_padding=0)
    ops.kv_store(*made.store)
    query, kv, params = bundled(*made.attend)
    plain = launch.paged_attention(query, kv, params)
    windowed = params._replace(window=4)
    near = launch.paged_attention(query, kv, windowed)
    with registry().changed(first=(entry,)):
        assert (launch.paged_attention(query, kv, params) == 2).all()
        assert torch.equal(launch.paged_attention(query, kv, windowed), near)
    assert torch.equal(launch.paged_attention(query, kv, params), plain)
    assert not torch.equal(plain, near)


def test_operations_can_be_left_out_and_come_back() -> None:
    with registry().changed(without=("matmul",)):
        assert registry().find("matmul", "fp8", HOPPER) is None
        assert registry().find("gated_matmul", "fp8", HOPPER) is not None
    assert registry().find("matmul", "fp8", HOPPER) is not None


class _Counted(Implementation):
    """Counts how often an architecture is compared with its own."""

    __slots__ = ()
    asked: ClassVar[list[str]] = []

    def serves(self, arch: Arch) -> bool:
        self.asked.append(arch.name)
        return Implementation.serves(self, arch)


def test_the_table_is_searched_once_per_operation_and_architecture() -> None:
    """Steps without a CUDA graph look up their kernels in each layer."""
    one, other = (_Counted("toy", f, ("sm123",)) for f in ("", "fp8"))
    _Counted.asked.clear()
    with registry().changed(first=(one, other)):
        for _ in range(3):
            assert registry().find("toy", "", TOY) is one
            assert registry().find("toy", "fp8", TOY) is other
            assert registry().find("toy", "", HOPPER) is None
            assert registry().find("toy", "", Arch("sm90")) is None
        assert _Counted.asked == ["sm123", "sm123", "sm90", "sm90"]
        with registry().changed(without=("toy",)):
            assert registry().find("toy", "", TOY) is None
        with registry().changed(first=(other,)):
            assert registry().find("toy", "fp8", TOY) is other
        assert registry().find("toy", "", TOY) is one
    assert registry().find("toy", "", TOY) is None


def test_the_driver_is_queried_once_per_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []

    def properties(index: int) -> SimpleNamespace:
        asked.append(index)
        return SimpleNamespace(
            multi_processor_count=7 + index,
            shared_memory_per_block_optin=99 << 10,
            major=12,
            minor=index - 100,
        )

    monkeypatch.setattr(torch.cuda, "get_device_properties", properties)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 103)
    for _ in range(2):
        cards = [Gpu.of(torch.device("cuda", index)) for index in (101, 102)]
        assert [card.num_sms for card in cards] == [108, 109]
        assert [card.arch.name for card in cards] == ["sm121", "sm122"]
        assert Gpu.of(torch.device("cuda")).num_sms == 110  # the current one
    assert asked == [101, 102, 103]


def test_a_module_of_kernels_is_imported_once_and_its_functions_can_be_replaced(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    name, module = "pagespec.kernels.toy.of_this_test", SimpleNamespace(launch=len)
    monkeypatch.setitem(sys.modules, name, module)
    entry = Implementation("toy", "", ("sm123",), {"launch": "toy.of_this_test:launch"})
    assert entry.function("launch") is len
    del sys.modules[name]  # another import would fail
    module.launch = max
    assert entry.function("launch") is max


def test_reading_the_table_imports_no_triton() -> None:
    program = (
        "import sys\n"
        "from pagespec.kernels.arch import Arch\n"
        "from pagespec.kernels.registry import registry\n"
        "assert registry().find('matmul', 'fp8', Arch('sm90', True))\n"
        "assert 'triton' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True)
