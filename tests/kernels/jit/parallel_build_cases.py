"""Kernels that launches need are built in parallel, in threads or in other processes.

The tests compile with Triton's own compiler for an H100. A fake driver only records loads and
launches.
"""

from __future__ import annotations

import gc
import importlib
import os
import threading
import time
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch

triton = pytest.importorskip("triton")
import triton.language as tl  # noqa: E402
from triton import knobs  # noqa: E402
from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.runtime import driver  # noqa: E402
from triton.runtime.jit import JITFunction  # noqa: E402

from pagespec.kernels.jit.cache_keys import precompute_cache_key  # noqa: E402
from pagespec.kernels.jit.compile_pool import compilers, current_compilers  # noqa: E402
from pagespec.kernels.jit.parallel_build import parallel_build, pin_triton_cache_dir  # noqa: E402

DEVICE = torch.device("cuda", 0)


class FakeDriver:
    """Attributes: ``loaded`` and ``launched``, names of kernels in order; ``loaders``, threads."""

    def __init__(self) -> None:
        self.utils = self
        self.loaded: list[str] = []
        self.launched: list[str] = []
        self.loaders: set[int] = set()

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, _device: int) -> int:
        return 0

    def get_device_properties(self, _device: int) -> dict[str, int]:
        return {"max_shared_mem": 232448}

    def load_binary(self, name: str, *_: Any) -> tuple[int, ...]:
        self.loaded.append(name)
        self.loaders.add(threading.get_ident())
        return 1, 2, 3, 0, 1024

    def unload_module(self, _module: int) -> None:
        pass

    def launcher_cls(self, _source: Any, metadata: Any) -> Any:
        return lambda *_: self.launched.append(metadata.name)


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[FakeDriver]:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(torch.cuda, "device", lambda _: nullcontext())
    fake = FakeDriver()
    # There is no other to go back to without a GPU.
    monkeypatch.setattr(driver, "_active", fake)
    yield fake
    gc.collect()  # kernels unload themselves, which is not for a real driver to do


def _copy(source, target, SIZE: tl.constexpr):  # type: ignore[no-untyped-def]
    at = tl.arange(0, SIZE)
    tl.store(target + at, tl.load(source + at))


def _broken(target, SIZE: tl.constexpr):  # type: ignore[no-untyped-def]
    tl.store(target + tl.arange(0, SIZE), there_is_no_such_name)  # type: ignore[name-defined]  # noqa: F821


# In a file of its own, for other processes to import.
MODULE = """
import triton
import triton.language as tl

FACTOR = tl.constexpr(3)

@triton.jit
def scaled(x):
    return x * FACTOR

@triton.jit
def first(source, target, SIZE: tl.constexpr):
    at = tl.arange(0, SIZE)
    tl.store(target + at, scaled(tl.load(source + at)))

@triton.jit
def second(source, target, SIZE: tl.constexpr):
    at = tl.arange(0, SIZE)
    tl.store(target + at, scaled(tl.load(source + at)) + 1)
"""


def _imported(name: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    (folder / f"{name}.py").write_text(MODULE)
    monkeypatch.syspath_prepend(str(folder))
    return importlib.import_module(name)


def _launch_copies(kernel: Any) -> None:
    source, target = torch.zeros(64), torch.zeros(64)
    for size in (16, 32, 64, 32, 16):
        kernel[(1,)](source, target, SIZE=size)


def test_what_is_missing_is_built_and_not_launched(fake: FakeDriver) -> None:
    kernel = JITFunction(_copy)
    with parallel_build(DEVICE) as built:
        _launch_copies(kernel)
        assert fake.launched == []
    assert fake.loaded == ["_copy"] * 3
    assert built.num_compiled == 3
    assert knobs.compilation.listener is None
    assert threading.get_ident() not in fake.loaders
    assert knobs.runtime.jit_cache_hook is None
    _launch_copies(kernel)
    assert fake.launched == ["_copy"] * 5
    assert fake.loaded == ["_copy"] * 3


def test_launchers_are_made_one_at_a_time(fake: FakeDriver) -> None:
    """As Triton 3.6 makes them: each is read from a module that all share, once it is loaded."""
    module: dict[str, Any] = {}

    def make(_source: Any, metadata: Any) -> Any:
        module["launch"] = size = metadata.hash
        time.sleep(0.02)
        launch = module["launch"]
        return lambda *_: fake.launched.append("its own" if launch == size else "another's")

    fake.launcher_cls = make  # type: ignore[method-assign]
    kernel = JITFunction(_copy)
    with parallel_build(DEVICE):
        _launch_copies(kernel)
    _launch_copies(kernel)
    assert fake.launched == ["its own"] * 5


def test_what_is_on_the_disk_is_not_compiled(fake: FakeDriver) -> None:
    _launch_copies(JITFunction(_copy))
    with parallel_build(DEVICE) as built:
        _launch_copies(JITFunction(_copy))
    assert fake.loaded == ["_copy"] * 6
    assert built.num_compiled == 0


def test_what_is_there_is_launched(fake: FakeDriver) -> None:
    kernel = JITFunction(_copy)
    _launch_copies(kernel)
    with parallel_build(DEVICE):
        _launch_copies(kernel)
    assert fake.launched == ["_copy"] * 10
    assert len(fake.loaded) == 3


def test_a_kernel_that_cannot_be_built_fails_at_its_launch(fake: FakeDriver) -> None:
    good, broken = JITFunction(_copy), JITFunction(_broken)
    target = torch.zeros(16)
    with parallel_build(DEVICE):
        broken[(1,)](target, SIZE=16)
        good[(1,)](target, target, SIZE=16)
    assert fake.loaded == ["_copy"]
    with pytest.raises(triton.CompilationError):
        broken[(1,)](target, SIZE=16)


def test_an_error_in_the_block_propagates_and_the_hook_is_removed(fake: FakeDriver) -> None:
    kernel = JITFunction(_copy)

    def launch_and_fail() -> None:
        _launch_copies(kernel)
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError), parallel_build(DEVICE):
        launch_and_fail()
    assert knobs.runtime.jit_cache_hook is None
    _launch_copies(kernel)
    assert len(fake.launched) == 5


def test_other_threads_compile_as_ever(fake: FakeDriver) -> None:
    kernel = JITFunction(_copy)
    with parallel_build(DEVICE):
        other = threading.Thread(target=_launch_copies, args=(kernel,))
        other.start()
        other.join()
        assert fake.launched == ["_copy"] * 5


def test_another_hook_stays(fake: FakeDriver) -> None:
    seen: list[str] = []

    def hook(*, fn: Any, **_: Any) -> bool:
        seen.append(fn.name)
        return False

    with knobs.runtime.scope():
        knobs.runtime.jit_cache_hook = hook
        with parallel_build(DEVICE):
            _launch_copies(JITFunction(_copy))
            assert fake.launched == ["_copy"] * 5
        assert len(seen) == 3
        assert knobs.runtime.jit_cache_hook is hook


def test_another_process_compiles(
    fake: FakeDriver, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernel = _imported("kernels_of_a_test", tmp_path, monkeypatch).second
    with compilers() as others:
        assert current_compilers() is others
        others.start()
        with parallel_build(DEVICE) as built:
            _launch_copies(kernel)
        # Each once: this process found what the other made.
        assert built.num_compiled == 3
        assert fake.loaded == ["second"] * 3
        with parallel_build(DEVICE) as built:
            _launch_copies(JITFunction(_copy))  # which no other process finds by its name
        assert built.num_compiled == 3
        others.ask(kernel, "no form")
        assert others.wait() == 0
        others.ask(_imported("kernels_left_over", tmp_path, monkeypatch).first, "no form")
    assert current_compilers() is None
    _launch_copies(kernel)
    assert fake.launched == ["second"] * 5


def test_without_the_other_process_this_one_compiles(
    fake: FakeDriver, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernel = _imported("kernels_of_another_test", tmp_path, monkeypatch).first
    with compilers() as others:
        others.start()
        assert others._process is not None
        others._process.kill()
        with parallel_build(DEVICE) as built:
            _launch_copies(kernel)
        assert others._process is None
    assert built.num_compiled == 3
    assert fake.loaded == ["first"] * 3


def test_a_child_that_dies_leaves_its_kernels_to_this_process(
    fake: FakeDriver, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernel = _imported("kernels_that_kill", tmp_path, monkeypatch).first
    (tmp_path / "kernels_that_kill.py").write_text("import os\nos.abort()\n")
    with compilers() as others:
        others.start()
        with parallel_build(DEVICE) as built:
            _launch_copies(kernel)
        assert built.num_compiled == 3
        assert fake.loaded == ["first"] * 3
        # The worker ends with the next request, at the latest.
        others.ask(kernel, "no form")
        assert others.wait() == 0
        assert others._process is None


def test_names_of_kernels_do_not_hang_on_their_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = []
    for number, order in enumerate((["first", "second"], ["second", "first"], ["second"])):
        module = _imported(f"kernels_in_order_{number}", tmp_path, monkeypatch)
        for name in order:
            precompute_cache_key(getattr(module, name))
        assert {name for name, _ in module.second.used_global_vals} == {"FACTOR"}
        keys.append(module.second.cache_key)
    assert len(set(keys)) == 1


def test_triton_keeps_kernels_where_it_would(monkeypatch: pytest.MonkeyPatch) -> None:
    """Inductor takes another folder only if the environment names none."""
    monkeypatch.delenv("TRITON_CACHE_DIR", raising=False)
    own = knobs.cache.dir
    pin_triton_cache_dir()
    assert os.environ["TRITON_CACHE_DIR"] == own == knobs.cache.dir
    monkeypatch.setenv("TRITON_CACHE_DIR", "/elsewhere")
    pin_triton_cache_dir()
    assert os.environ["TRITON_CACHE_DIR"] == "/elsewhere"
