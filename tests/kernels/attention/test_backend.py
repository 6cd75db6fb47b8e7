"""The choice of the attention backend, and rejected settings, with simulated GPU properties."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from pagespec.errors import InvalidInputError
from pagespec.kernels import ops  # noqa: F401 - it registers them
from pagespec.kernels.arguments import AttentionParams, PagedKV
from pagespec.kernels.attention import flash, reference
from pagespec.kernels.attention.attention_spec import AttentionSpec
from pagespec.kernels.attention.backend import AttentionBackend, select_backend
from pagespec.kernels.fused import dispatch as fused
from tests.kernels.attention.test_flash import fake_2, fake_4, install

SPEC = AttentionSpec(0, 32, 8, 128, 128, 128**-0.5)
CUDA = torch.device("cuda")


@pytest.fixture
def choose(cuda_capability: Callable[[tuple[int, int]], None]) -> Callable[..., AttentionBackend]:
    """:func:`select_backend` on an H100, bf16, blocks of 16, unless said otherwise."""

    def run(
        requested: str, capability: tuple[int, int] = (9, 0), **changes: Any
    ) -> AttentionBackend:
        cuda_capability(capability)
        arguments = {
            "device": CUDA,
            "dtype": torch.bfloat16,
            "specs": [SPEC],
            "block_size": 16,
        }
        return select_backend(requested, **arguments | changes)

    return run


def test_auto(choose: Callable[..., AttentionBackend]) -> None:
    assert choose("auto").name == "triton"
    on_cpu = choose("auto", device=torch.device("cpu"))
    assert (on_cpu.name, on_cpu.attend) == ("reference", reference.paged_attention)
    assert "cpu" in on_cpu.reason
    assert not on_cpu.capturable
    unsupported = choose("auto", block_size=512)
    assert (unsupported.name, unsupported.store) == ("reference", fused.kv_store)
    assert "512" in unsupported.reason


@pytest.mark.parametrize(
    ("changes", "reason"),
    [({"chunk": 64}, "within chunks"), ({"alibi_slopes": (0.5,) * 32}, "ALiBi slopes")],
)
def test_masks_and_biases_that_only_the_reference_has(
    changes: dict[str, Any], reason: str, choose: Callable[..., AttentionBackend]
) -> None:
    specs = [SPEC, replace(SPEC, call=1, **changes)]
    chosen = choose("auto", specs=specs)
    assert chosen.name == "reference"
    assert reason in chosen.reason
    assert AttentionParams(1.0, **changes).is_reference_only
    for name in ("triton", "flash"):
        with pytest.raises(InvalidInputError, match=reason):
            choose(name, specs=specs)


def test_chosen_keys_are_served_but_not_in_e4m3(choose: Callable[..., AttentionBackend]) -> None:
    specs = [replace(SPEC, num_chosen=64, index_dim=16, index_dtype="bfloat16")]
    assert choose("auto", specs=specs).name == "triton"
    with pytest.raises(InvalidInputError, match="no kernel for keys that an indexer chooses"):
        choose("auto", specs=specs, kv_cache_dtype="fp8")


def test_forced(choose: Callable[..., AttentionBackend], monkeypatch: pytest.MonkeyPatch) -> None:
    assert choose("triton").capturable
    assert choose("reference").name == "reference"
    install(monkeypatch, two=fake_2, four=fake_4)
    assert choose("flash").attend is flash.attend_4
    assert choose("flash").capturable
    uneven = [replace(SPEC, k_dim=192)]
    assert choose("flash", capability=(10, 0), specs=uneven).attend is flash.attend_4
    on_ada = choose("flash", capability=(8, 9), block_size=256)
    assert on_ada.attend is flash.attend_2
    assert on_ada.reason.startswith("attention by flash-attn;")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"device": torch.device("cpu")}, 'not device "cpu"'),
        ({"capability": (7, 5)}, "this GPU has 7.5"),
        ({"dtype": torch.float64}, "not float64"),
        ({"block_size": 8}, "not 8"),
        ({"block_size": 48}, "not 48"),
        ({"block_size": 512}, "not 512"),
        ({"specs": [SPEC, replace(SPEC, v_dim=512)]}, "not 512"),
    ],
)
def test_triton_is_refused(
    choose: Callable[..., AttentionBackend], changes: dict[str, Any], words: str
) -> None:
    with pytest.raises(InvalidInputError, match=words) as caught:
        choose("triton", **changes)
    assert (caught.value.field, caught.value.value) == ("attention", "triton")
    instead = choose("auto", **changes)
    assert instead.name == "reference"
    if "device" not in changes:  # then it gives its own reason
        assert words in instead.reason


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"device": torch.device("cpu")}, ['not device "cpu"']),
        ({"dtype": torch.float32}, ["flash-attn-4 takes float16", "flash-attn takes float16"]),
        ({"capability": (8, 0)}, ["9 to 11 only, not 8", "multiple of 256, not 16"]),
        ({"capability": (7, 5), "block_size": 256}, ["not 7", "8 or more"]),
        ({"block_size": 128}, ["unused slots where blocks hold 128", "not 128"]),
        ({"block_size": 64, "specs": [replace(SPEC, v_dim=64)]}, ["blocks hold 64", "not 64"]),
        ({"specs": [replace(SPEC, k_dim=24, v_dim=24)]}, ["multiples of 16"]),
        ({"specs": [replace(SPEC, k_dim=512)]}, ["head sizes (512, 128)"]),
        ({"capability": (10, 0), "specs": [replace(SPEC, k_dim=256)]}, ["head sizes (256, 128)"]),
        ({"capability": (12, 0), "block_size": 256, "specs": [replace(SPEC, has_sinks=True)]},
         ["not 12", "no attention sinks"]),
        ({"capability": (8, 6), "block_size": 256, "specs": [replace(SPEC, v_dim=64)]},
         ["one head size, not 128 and 64"]),
    ],
)  # fmt: skip
def test_flash_is_refused(
    choose: Callable[..., AttentionBackend],
    changes: dict[str, Any],
    words: list[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    install(monkeypatch, two=fake_2, four=fake_4)
    with pytest.raises(InvalidInputError) as caught:
        choose("flash", **changes)
    assert (caught.value.field, caught.value.value) == ("attention", "flash")
    assert [word for word in words if word not in caught.value.limit] == []


def test_flash_is_refused_where_it_is_not_installed(
    choose: Callable[..., AttentionBackend], monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in ("flash_attn", "flash_attn.cute"):
        monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(InvalidInputError, match="flash-attn-4 is not installed"):
        choose("flash", block_size=256)


def test_an_unknown_name_is_refused(choose: Callable[..., AttentionBackend]) -> None:
    with pytest.raises(InvalidInputError, match="must be one of auto, triton, flash, reference"):
        choose("sdpa")


def test_auto_takes_no_library(
    choose: Callable[..., AttentionBackend], monkeypatch: pytest.MonkeyPatch
) -> None:
    install(monkeypatch, two=fake_2, four=fake_4)
    assert choose("auto").name == "triton"


@pytest.mark.parametrize("name", ["triton", "flash", "reference"])
def test_functions_take_what_the_ops_take(
    name: str, choose: Callable[..., AttentionBackend], monkeypatch: pytest.MonkeyPatch
) -> None:
    install(monkeypatch, two=fake_2, four=fake_4)
    chosen = choose(name)
    takes_order = ["order"] if chosen.longest_first is not None else []
    assert bool(takes_order) == (name == "triton")
    arguments = ["query", "kv", "params", *takes_order]
    parameters = inspect.signature(chosen.attend).parameters
    assert list(parameters)[: len(arguments)] == arguments
    others = list(parameters.values())[len(arguments) :]
    assert all(other.default is None for other in others)
    names = [argument.name for argument in torch.ops.pagespec.kv_store.default._schema.arguments]
    assert list(inspect.signature(chosen.store).parameters) == names
    bundles = (*PagedKV._fields, *AttentionParams._fields)
    op = torch.ops.pagespec.paged_attention.default
    assert [argument.name for argument in op._schema.arguments] == ["query", *bundles]
