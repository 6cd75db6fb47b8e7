"""Scripts that need a GPU end at once on a machine without one, with one line."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

_ROOT = Path(__file__).parents[2]
_ON_CPU = (
    *(
        "acceptance",
        "bad_clients",
        "cpu",
        "crowd",
        "flood",
        "perplexity",
        "pictures",
        "policies",
        "scheduler",
    ),
    *("serve_streams", "shots", "tracing", "worker"),
)
"""Scripts that need no GPU."""
_SCRIPTS = {
    path.stem: text
    for path in sorted((_ROOT / "benchmarks").glob("*.py"))
    if '__name__ == "__main__"' in (text := path.read_text())
}


@pytest.mark.parametrize("name", sorted(_SCRIPTS.keys() - _ON_CPU))
def test_a_script_says_that_it_needs_a_gpu(name: str, tmp_path: Path) -> None:
    done = _run(name, tmp_path, has_torch=name == "roofline")  # its table of models imports torch
    assert (done.returncode, done.stdout) == (2, "")
    needed = "2 GPUs" if name == "all_reduce" else "a GPU"
    assert done.stderr.startswith(f"needs {needed}: no CUDA devices found here")
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize("name", _ON_CPU)
def test_a_script_for_a_cpu_needs_no_gpu(name: str) -> None:
    assert "require_gpu" not in _SCRIPTS[name]


@pytest.mark.parametrize("arguments", [["--help"], ["--model", "tiny"], ["--model=tiny"]])
def test_a_run_without_a_gpu_begins(arguments: list[str], tmp_path: Path) -> None:
    done = _run("throughput", tmp_path, *arguments)
    assert "torch was imported" in done.stderr


def _run(
    name: str, folder: Path, *arguments: str, has_torch: bool = False
) -> subprocess.CompletedProcess[str]:
    """The script, where importing torch fails."""
    if not has_torch:
        (folder / "torch.py").write_text("raise SystemExit('torch was imported')")
    paths = [str(folder), str(_ROOT), os.environ.get("PYTHONPATH", "")]
    return subprocess.run(
        [sys.executable, "-m", f"benchmarks.{name}", *arguments],
        env=os.environ | {"CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": os.pathsep.join(paths)},
        capture_output=True,
        text=True,
        cwd=_ROOT,
        timeout=300,
        check=False,
    )
