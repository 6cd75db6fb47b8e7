"""What the assembler says of a kernel for Hopper: registers, spills, matmuls that are serialised.

Needs no GPU; not for a process in which Triton interprets.
"""

from __future__ import annotations

import os
import subprocess
import tempfile

import triton.backends.nvidia as nvidia


def assembled(ptx: str) -> str:
    """ptxas's report of ``ptx`` for sm_90a."""
    assembler = os.path.join(os.path.dirname(nvidia.__file__), "bin", "ptxas")
    with tempfile.NamedTemporaryFile("w", suffix=".ptx") as file:
        file.write(ptx)
        file.flush()
        command = [assembler, "-v", "-arch=sm_90a", file.name, "-o", os.devnull]
        return subprocess.run(command, capture_output=True, text=True, check=True).stderr
