"""The compiled kernels: the machine's C++ compiler builds them at first use; then they are read
from disk.

The interface is plain C, so no torch or Python headers are compiled: compilation takes 5 s instead
of a minute. The functions use the OpenMP threads that torch uses; a second pool would compete for
the cores.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import logging
import os
import platform
import shutil
import stat
import subprocess
import tempfile
import threading
from concurrent.futures import Future
from pathlib import Path

import torch

from ...disk_cache import cache_root, write_whole

logger = logging.getLogger(__name__)

_FOLDER = Path(__file__).parent
_SOURCES = ("linear.cpp", "attention.cpp", "rowwise.cpp", "replay.cpp")
_HEADERS = ("common.h", "vectors.h", "vectors_avx512.h", "vectors_avx2.h")
_FLAGS = (
    *("-std=c++17", "-O3", "-fPIC", "-shared", "-fopenmp", "-fvisibility=hidden"),
    # An element must not be computed in two ways; see common.h.
    "-ffp-contract=off",
)
_AVX512_FLAGS = (
    *("-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mavx512vnni", "-mfma", "-mf16c"),
)
_AVX2_NEEDS = ("avx2", "fma", "f16c")
_AVX2_FLAGS = tuple(f"-m{name}" for name in _AVX2_NEEDS)
_COMPILERS = ("g++", "clang++", "c++")
_TIMEOUT_S = 120.0
_P, _L, _F, _I = ctypes.c_void_p, ctypes.c_long, ctypes.c_float, ctypes.c_int
ARGUMENTS = {
    "linear": (_P, _L, _P, _L, _L, _I, _P, _P, _P, _P, _P, _I),
    "attention": (*(_P,) * 8, *(_L,) * 9, _F, _F, _P, _I),
    "rms_norm": (_P, _P, _P, _F, _F, _L, _L, _P, _P, _I),
    "gated_activation": (_P, _L, _P, _L, _I, _L, _L, _P, _I),
    "rope_store": (
        *(*(_P,) * 3, *(_L,) * 6, _P, _P, _L, _L, _P, _P, _F, _F),
        *(_P, *(_L,) * 5, _P, _P, _P, _I),
    ),
}
"""Argument types of the functions that :mod:`.calls` uses."""
_REPLAY = (_P, _L, _P, _L, _P)


@functools.cache
def reason_against() -> str | None:
    """The reason why this machine cannot have the kernels, as far as known without compiling
    them."""
    if platform.system() != "Linux" or platform.machine() != "x86_64":
        return "needs Linux on x86-64"
    if _processor_flags() is None:
        return "needs a processor with AVX2, FMA and F16C, or with AVX512 and VNNI"
    if _compiler() is None:
        return "needs a C++ compiler (g++ or clang++)"
    if _openmp() is None:
        return "needs a torch that runs on GNU's OpenMP"
    return None


def _processor_flags() -> tuple[str, ...] | None:
    """Compiler flags for the instruction sets that this processor has and torch uses.

    The choice does not affect the bits of a result: see ``vectors.h``.
    """
    capability = torch.backends.cpu.get_cpu_capability()
    has_vnni = getattr(torch.cpu, "_is_vnni_supported", lambda: False)
    if capability == "AVX512" and has_vnni():
        return _AVX512_FLAGS
    if capability in ("AVX2", "AVX512") and set(_AVX2_NEEDS) <= _processor_features():
        return _AVX2_FLAGS
    return None


def _processor_features() -> set[str]:
    """CPU features by Linux's names; empty where Linux lists none."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return set()
    return set(next((line for line in lines if line.startswith("flags")), "").split())


def library() -> ctypes.CDLL | None:
    """The kernels; None if they are not available. Waits for the compiler if necessary."""
    return begin_build().result()


@functools.cache
def begin_build() -> Future[ctypes.CDLL | None]:
    """Start to compile or load the kernels in a thread, once per process."""
    future: Future[ctypes.CDLL | None] = Future()

    def build() -> None:
        loaded = None
        try:
            reason = reason_against()
            if reason is None:
                loaded = _loaded()
        except (OSError, subprocess.SubprocessError, AttributeError) as error:
            reason = str(error)
        if reason is not None:
            logger.info("native kernels: none: %s", reason)
        future.set_result(loaded)

    threading.Thread(target=build, name="pagespec-native-build", daemon=True).start()
    return future


def _loaded() -> ctypes.CDLL:
    file = cache_root() / "native" / f"{_key()}.so"
    if not _is_private(file):
        write_whole(file, _compiled())
    kernels = ctypes.CDLL(str(file))
    for name, arguments in {**ARGUMENTS, "replay": _REPLAY}.items():
        function = getattr(kernels, name)
        function.argtypes, function.restype = arguments, None
    return kernels


def _key() -> str:
    """A digest of everything that the result depends on."""
    compiler = _compiler()
    assert compiler is not None
    status = os.stat(compiler)
    digest = hashlib.sha256(
        repr((compiler, status.st_size, status.st_mtime_ns, _flags(), _openmp())).encode()
    )
    for name in (*_HEADERS, *_SOURCES):
        digest.update((_FOLDER / name).read_bytes())
    return digest.hexdigest()[:32]


def _flags() -> tuple[str, ...]:
    processor = _processor_flags()
    assert processor is not None
    return (*_FLAGS, *processor)


def _is_private(file: Path) -> bool:
    """Whether it exists and only this user can have written it."""
    try:
        status = file.stat()
    except FileNotFoundError:
        return False
    return status.st_uid == os.getuid() and not status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)


def _compiled() -> bytes:
    compiler, openmp = _compiler(), _openmp()
    assert compiler is not None
    assert openmp is not None
    logger.info("compiling the native kernels with %s", compiler)
    with tempfile.TemporaryDirectory(prefix="pagespec-native-") as folder:
        made = Path(folder) / "kernels.so"
        sources = [str(_FOLDER / name) for name in _SOURCES]
        # The library by its path, instead of the one that -fopenmp would find.
        command = [compiler, *_flags(), *sources, "-o", str(made), openmp]
        done = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT_S)
        if done.returncode:
            raise OSError(f"{compiler} failed: {done.stderr.strip()[:500]}")
        return made.read_bytes()


def _compiler() -> str | None:
    return next(filter(None, map(shutil.which, _COMPILERS)), None)


@functools.cache
def _openmp() -> str | None:
    """The file of GNU's OpenMP that this process has loaded."""
    try:
        lines = Path("/proc/self/maps").read_text().splitlines()
    except OSError:
        return None
    paths = [line.split(None, 5)[-1] for line in lines if "libgomp" in line]
    return next((path for path in paths if path.startswith("/")), None)
