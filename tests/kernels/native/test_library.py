"""The compiled library of native kernels: built once, cached, and optional where it cannot be
built.
"""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from pagespec.kernels.native import library

Build = Callable[[], ctypes.CDLL | None]


@pytest.fixture
def build(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Build]:
    """A build in a new process with its own cache."""
    monkeypatch.setenv("PAGESPEC_CACHE", str(tmp_path))

    def build() -> ctypes.CDLL | None:
        library.reason_against.cache_clear()
        return library.begin_build.__wrapped__().result()

    yield build
    library.reason_against.cache_clear()


@pytest.fixture
def compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The only compiler that is found: a file that the test writes."""
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", str(folder))
    return folder / "g++"


def write_program(file: Path, text: str) -> None:
    file.write_text(f"#!/bin/sh\n{text}\n")
    file.chmod(0o755)


@pytest.mark.skipif(library.library() is None, reason="the native kernels cannot be built")
def test_compiled_once_and_again_if_others_could_write(
    tmp_path: Path, build: Build, compiler: Path
) -> None:
    made = library.library()
    assert made is not None
    compiled, log = made._name, tmp_path / "log"
    # Its last arguments: "-o", the file to make, and OpenMP.
    write_program(
        compiler, f"echo >> '{log}'; eval made=\\${{$(($# - 1))}}; /bin/cp '{compiled}' $made"
    )
    assert build() is not None
    assert build() is not None
    assert log.read_text() == "\n"
    [file] = (tmp_path / "native").iterdir()
    file.chmod(0o666)
    assert build() is not None
    assert log.read_text() == "\n\n"
    assert file.stat().st_mode & 0o077 == 0


@pytest.mark.skipif(library.reason_against() is not None, reason=str(library.reason_against()))
def test_a_compiler_that_fails(
    compiler: Path, build: Build, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "pagespec")
    write_program(compiler, "echo no memory >&2; exit 1")
    assert build() is None
    assert f"{compiler} failed: no memory" in caplog.text


@pytest.mark.skipif(library.reason_against() is not None, reason=str(library.reason_against()))
@pytest.mark.usefixtures("compiler")
def test_a_machine_without_what_they_need(
    monkeypatch: pytest.MonkeyPatch,
    cpu_capability: Callable[[str], None],
    build: Build,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO, "pagespec")
    assert build() is None
    assert "C++ compiler" in caplog.messages[-1]
    cpu_capability("DEFAULT")
    assert build() is None
    assert "AVX2, FMA and F16C, or with AVX512 and VNNI" in caplog.messages[-1]
    monkeypatch.setattr(library.platform, "machine", lambda: "arm64")
    assert build() is None
    assert "Linux on x86-64" in caplog.messages[-1]


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
