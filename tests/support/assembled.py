"""ptxas's report on a compiled Hopper kernel: registers, spills and serialised matmuls.

Needs no GPU. Cannot be used in a process in which Triton interprets kernels.
"""

from __future__ import annotations

import os
import re
import subprocess
import tempfile
from typing import Any

import triton.backends.nvidia as nvidia


def assembled(ptx: str) -> str:
    """ptxas's report of ``ptx`` for sm_90a."""
    assembler = os.path.join(os.path.dirname(nvidia.__file__), "bin", "ptxas")
    with tempfile.NamedTemporaryFile("w", suffix=".ptx") as file:
        file.write(ptx)
        file.flush()
        command = [assembler, "-v", "-arch=sm_90a", file.name, "-o", os.devnull]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
    return done.stdout + done.stderr


def repeated_pairs(ptx: str) -> list[str]:
    """Registers that contain one pair of 8-bit values twice. ptxas before CUDA 13 reads their upper
    halves from an uninitialised register."""
    pair = r"cvt\.rn\.satfinite\.e\dm\dx2\.f32\s+(%\w+), (%\w+, %\w+);"
    pairs = dict(re.findall(pair, ptx))
    words = re.finditer(r"mov\.b32\s+%\w+, \{(%\w+), (%\w+)\};", ptx)
    return [m[0] for m in words if m[1] in pairs and pairs[m[1]] == pairs.get(m[2])]


def described(built: Any) -> dict[str, Any]:
    """Properties of a compiled warp-specialised kernel."""
    ptx = built.asm["ptx"]
    said = assembled(ptx)
    spilled = re.search(r"(\d+) bytes spill stores", said)
    assert spilled is not None
    return {
        "warnings": re.findall(r"^.*(?:warning|\(C\d+\)).*$", said, re.MULTILINE),
        "spilled": int(spilled[1]),
        "shared": built.metadata.shared,
        "registers": sorted(set(map(int, re.findall(r"setmaxnreg\S+\s+(\d+)", ptx)))),
        "repeated_pairs": repeated_pairs(ptx),
        "roundings": sorted(set(re.findall(r"\b(?:ex2|div)\.\w+(?:\.ftz)?\.f32", ptx))),
    }
