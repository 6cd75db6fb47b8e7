"""The compiled kernels: made once, kept, and done without where they cannot be made."""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from pagespec.kernels.native import library

Build = Callable[[], ctypes.CDLL | None]


@pytest.fixture
def build(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Build:
    """A build as of a process of its own, with a cache of its own."""
    monkeypatch.setenv("PAGESPEC_CACHE", str(tmp_path))
    return lambda: library.begin_build.__wrapped__().result()


@pytest.mark.skipif(library.library() is None, reason="the native kernels cannot be built")
def test_compiled_once_and_again_if_others_could_write(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, build: Build
) -> None:
    compiled, made = library._compiled, []

    def counted() -> bytes:
        made.append(compiled() if not made else made[0])
        return made[0]

    monkeypatch.setattr(library, "_compiled", counted)
    assert build() is not None
    assert build() is not None
    assert len(made) == 1
    [file] = (tmp_path / "native").iterdir()
    file.chmod(0o666)
    assert build() is not None
    assert len(made) == 2
    assert file.stat().st_mode & 0o077 == 0


@pytest.mark.skipif(library.reason_against() is not None, reason=str(library.reason_against()))
def test_a_compiler_that_fails(
    monkeypatch: pytest.MonkeyPatch, build: Build, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "pagespec")
    monkeypatch.setattr(library, "_compiler", lambda: "/bin/false")
    assert build() is None
    assert "/bin/false failed" in caplog.text


def test_a_machine_without_what_they_need(monkeypatch: pytest.MonkeyPatch, build: Build) -> None:
    find = library.reason_against.__wrapped__
    monkeypatch.setattr(library, "reason_against", find)
    monkeypatch.setattr(library, "_compiler", lambda: None)
    monkeypatch.setattr(library.platform, "system", lambda: "Linux")
    monkeypatch.setattr(library.platform, "machine", lambda: "x86_64")
    monkeypatch.setattr(library, "_processor_flags", lambda: ("-mavx2",))
    assert "C++ compiler" in find()
    monkeypatch.setattr(library, "_processor_flags", lambda: None)
    assert "AVX2, FMA and F16C, or with AVX512 and VNNI" in find()
    monkeypatch.setattr(library.platform, "machine", lambda: "arm64")
    assert "Linux on x86-64" in find()
    assert build() is None


@pytest.mark.parametrize(
    ("capability", "has_vnni", "features", "flag"),
    [
        ("AVX512", True, "avx2 fma f16c", "-mavx512vnni"),
        ("AVX512", False, "avx2 fma f16c avx512f", "-mavx2"),
        # As of a processor that has AVX512 where ATEN_CPU_CAPABILITY says otherwise.
        ("AVX2", True, "avx2 fma f16c avx512f", "-mavx2"),
        ("AVX2", False, "avx2 fma", None),
        ("AVX2", False, "", None),
        ("DEFAULT", True, "avx2 fma f16c", None),
    ],
)
def test_flags_by_processor(
    monkeypatch: pytest.MonkeyPatch,
    cpu_capability: Callable[[str], None],
    capability: str,
    has_vnni: bool,
    features: str,
    flag: str | None,
) -> None:
    cpu_capability(capability)
    monkeypatch.setattr(torch.cpu, "_is_vnni_supported", lambda: has_vnni, raising=False)
    monkeypatch.setattr(library, "_processor_features", lambda: set(features.split()))
    flags = library._processor_flags()
    assert flags is None if flag is None else flags is not None and flag in flags


@pytest.mark.skipif(library.reason_against() is not None, reason=str(library.reason_against()))
def test_a_build_is_of_its_flags(monkeypatch: pytest.MonkeyPatch) -> None:
    keys = []
    for flags in (library._AVX2_FLAGS, library._AVX512_FLAGS):
        monkeypatch.setattr(library, "_processor_flags", lambda flags=flags: flags)
        keys.append(library._key())
    assert keys[0] != keys[1]
