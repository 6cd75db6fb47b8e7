"""Programs in a process of their own, in which Triton does not interpret: here, it does."""

from __future__ import annotations

import os
import subprocess
import sys


def run_apart(*arguments: str) -> str:
    """What Python prints, called with these arguments and the modules of this process. It must
    end well."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.pathsep.join(p for p in sys.path if p)
    done = subprocess.run(
        [sys.executable, *arguments], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, (done.stdout + done.stderr)[-3000:]
    return done.stdout
