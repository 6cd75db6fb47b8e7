"""Fixtures and set-up of the whole test suite.

Hypothesis profiles are chosen with HYPOTHESIS_PROFILE: `ci` (default: derandomised, the same
examples every time), `dev` (random, short), `deep` (random, long).
"""

from __future__ import annotations

import gc
import importlib.util
import logging
import os
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

# Before torch is imported. Tiny matrices gain nothing from threads, and on a machine that is shared
# OpenMP's threads wait for each other at every matmul: runs 100 times slower have been measured.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
from torch.overrides import TorchFunctionMode

IS_WORKER = "PYTEST_XDIST_WORKER" in os.environ

# Before Triton is imported, which any test that compiles may do: without a GPU its kernels are
# interpreted. With one they are compiled, and test_decode_gpu.py tests the same on it.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
elif IS_WORKER:
    # Beside other processes that compile: no pool of Inductor's own in each of them.
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
collect_ignore = []
if os.environ.get("TRITON_INTERPRET") != "1" or importlib.util.find_spec("triton") is None:
    collect_ignore += ["kernels/attention/test_decode.py", "kernels/attention/test_prefill.py"]
    collect_ignore += ["kernels/attention/test_decode_prologue.py", "kernels/mla/test_kernels.py"]
    collect_ignore += ["kernels/attention/test_e4m3_tiles.py", "kernels/sparse/test_chosen.py"]
    collect_ignore += ["kernels/sparse/test_index_kernels.py"]
    collect_ignore += ["compile/passes/test_index_gpu_passes.py"]
else:
    from tests.support.interpreter import hasten, mend

    mend()
    hasten()

_COMMON = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow]}
settings.register_profile("ci", max_examples=150, derandomize=True, **_COMMON)
settings.register_profile("dev", max_examples=150, **_COMMON)
settings.register_profile("deep", max_examples=10_000, **_COMMON)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))

# Traces and interpreted kernels make millions of objects in few cycles: by the default of 700 the
# collector takes one second in twenty.
gc.set_threshold(50_000, 20, 20)


@pytest.hookimpl(tryfirst=True, specname="pytest_collection_modifyitems")
def pytest_collected(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark nightly cases before ``-m`` deselects them: see tests/by_day.py."""
    from tests.by_day import mark_nightly

    is_whole = not any("::" in argument for argument in config.args)
    mark_nightly(items, is_whole=is_whole)


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Order GPU tests for runs with several processes: see tests/support/gpu_runs.py."""
    if IS_WORKER and all(item.get_closest_marker("gpu") for item in items):
        from tests.support.gpu_runs import spread

        files = [item.nodeid.partition("::")[0] for item in items]
        order = spread(files, config.workerinput["workercount"])  # type: ignore[attr-defined]
        items[:] = [items[i] for i in order]


@pytest.fixture(autouse=True, scope="session")
def _kernels_compiled_once(tmp_path_factory: pytest.TempPathFactory) -> None:
    if IS_WORKER and torch.cuda.is_available():
        from pagespec.kernels.jit.parallel_build import pin_triton_cache_dir
        from tests.support.gpu_runs import compile_once

        pin_triton_cache_dir()  # Inductor would name a folder of its own there
        folder = tmp_path_factory.getbasetemp().parent / "compiling"
        folder.mkdir(exist_ok=True)
        compile_once(folder)


@pytest.fixture(autouse=True, scope="session")
def _shared_graphs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """One folder of traced graphs for all processes of a test run (tests/support/captures.py)."""
    folder = tmp_path_factory.getbasetemp()
    if IS_WORKER:
        folder = folder.parent
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PAGESPEC_TEST_GRAPHS", str(folder / "graphs"))
        yield


@pytest.fixture(autouse=True, scope="module")
def _frozen_before() -> None:
    """Exclude objects that earlier files created from this file's garbage collections. A collection
    through the millions of objects of torch, sympy and transformers takes half a second, and
    closing an engine collects."""
    gc.collect()
    gc.freeze()
    if IS_WORKER and torch.cuda.is_initialized():
        torch.cuda.empty_cache()  # for the other processes


@pytest.fixture(autouse=True, scope="session")
def _quiet_dynamo() -> Iterator[None]:
    """Keep Dynamo's structured trace away from pytest's log capture, which formats every record
    and makes a capture several times slower."""
    logger = logging.getLogger("torch.__trace")
    before = logger.disabled
    logger.disabled = True
    yield
    logger.disabled = before


@pytest.fixture
def cuda_capability(monkeypatch: pytest.MonkeyPatch) -> Callable[[tuple[int, int]], None]:
    """Sets the compute capability that every GPU reports."""

    def become(capability: tuple[int, int]) -> None:
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _=None: capability)

    return become


@pytest.fixture
def cpu_capability(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Sets the vector instructions that torch reports; "DEFAULT" has none that pagespec needs."""

    def become(capability: str) -> None:
        monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: capability)

    return become


class _Calls(TorchFunctionMode):
    def __init__(self) -> None:
        super().__init__()
        self.made: dict[Any, Any] = {}

    def __torch_function__(self, func: Any, _: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self.made.get(func, func)(*args, **(kwargs or {}))


@pytest.fixture
def torch_calls() -> Iterator[dict[Any, Any]]:
    """Replacements for functions of torch, such as ``F.linear``; empty at first."""
    with _Calls() as mode:
        yield mode.made


@pytest.fixture
def cpu_machine(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., None]]:
    """Sets the usable cores, and the measured seconds of matmuls per number of threads. Clears the
    process's earlier measurements."""
    from pagespec.runner.cpu import threads as cpu_threads

    def become(num_cores: int, measure: Callable[[int], float]) -> None:
        monkeypatch.setattr(cpu_threads, "usable_cores", lambda: num_cores)
        for name in ("measured", "measured_again"):
            monkeypatch.setattr(cpu_threads, name, measure)

    def forget() -> None:
        cpu_threads.torchs_number.cache_clear()
        cpu_threads.shared_threads.cache_clear()

    before = torch.get_num_threads()
    forget()
    yield become
    torch.set_num_threads(before)
    forget()


@pytest.fixture
def free_memory(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Sets the bytes of free host memory that engines see."""
    from pagespec.runner import kv_budget

    return lambda size: monkeypatch.setattr(kv_budget, "available_bytes", lambda: size)


@pytest.fixture
def interpreted_norm(monkeypatch: pytest.MonkeyPatch) -> None:
    """Uses the interpreted Triton norm on a CPU too, since fused kernels compute their mean as it
    does."""
    from pagespec.kernels.fused import dispatch, rms_norm

    monkeypatch.setattr(dispatch, "add_rms_norm", rms_norm.add_rms_norm)


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How often each tensor of a checkpoint was read."""
    from pagespec.compile.load.checkpoint import Checkpoint

    found: Counter[str] = Counter()
    get = Checkpoint.get

    def counted(self: Checkpoint, name: str) -> torch.Tensor:
        found[name] += 1
        return get(self, name)

    monkeypatch.setattr(Checkpoint, "get", counted)
    return found


@pytest.fixture(autouse=True)
def logs_as_before() -> Iterator[None]:
    """Removes the log handlers that a command set up: their stream is pytest's, and closed after
    the test."""
    root, own = logging.getLogger(), logging.getLogger("pagespec")
    before, levels = list(root.handlers), (root.level, own.level)
    yield
    root.handlers = [
        h for h in root.handlers if h in before or type(h) is not logging.StreamHandler
    ]
    root.setLevel(levels[0])
    own.setLevel(levels[1])
