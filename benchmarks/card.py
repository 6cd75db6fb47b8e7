"""The rates of this GPU, from which rooflines are computed: read bandwidth of its memory, and
matmul rate.

    python -m benchmarks.card [--fresh]

The rates are measured once per GPU, driver and torch version, and stored in pagespec's cache
folder. The read is :func:`benchmarks.plain_read.plain_read` of 2 GiB. The matmul rate is the best
of ``torch.mm`` of square bfloat16 matrices of two sizes, with normally distributed values (zeros
would be faster, because they take less power). A machine without a GPU is also measured, in
float32, so that benchmarks can be tried on it.
"""

from __future__ import annotations

from benchmarks.gpu import require_gpu

if __name__ == "__main__":
    require_gpu("--json")  # before torch is imported

import argparse
import hashlib
import json
import platform
import subprocess
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

from benchmarks.gpu_timing import median_of_runs
from pagespec.disk_cache import cache_root, write_whole

_READ_BYTES = 2 << 30
_CPU_READ_BYTES = 256 << 20
_MATRIX_SIZES = (4096, 8192)


@dataclass(frozen=True)
class CardRates:
    """The measured rates of one GPU.

    Attributes:
        name: as the driver reports it. driver: versions of driver and torch.
        read_bandwidth: bytes per second. matrix_rate: operations per second, dense bfloat16.
    """

    name: str
    driver: str
    read_bandwidth: float
    matrix_rate: float

    def __str__(self) -> str:
        return (
            f"{self.name} ({self.driver}): {self.read_bandwidth / 1e12:.2f} TB/s read, "
            f"{self.matrix_rate / 1e12:.0f} TFLOP/s, measured on it"
        )


def card_rates() -> CardRates:
    """The rates of this machine's first GPU, measured by a separate process, which leaves nothing
    on the GPU.

    Raises:
        RuntimeError: that process failed; it printed the reason to standard error.
    """
    command = [sys.executable, "-m", "benchmarks.card", "--json"]
    done = subprocess.run(
        command, stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parent.parent, check=False
    )
    if done.returncode != 0:
        raise RuntimeError(f"measuring the card ended with {done.returncode}")
    return CardRates(**json.loads(done.stdout))


def rates_of_this_process(is_fresh: bool = False) -> CardRates:
    """Stored rates, or rates measured now on the current device, which needs 4 GiB of memory."""
    name, driver = _identity()
    file = _file_of(name, driver)
    kept = None if is_fresh else _read_kept(file)
    if kept is not None:
        return kept
    rates = CardRates(name, driver, *_measure())
    write_whole(file, json.dumps(asdict(rates)).encode())
    return rates


def _file_of(name: str, driver: str) -> Path:
    key = hashlib.sha256(f"{name}\n{driver}".encode()).hexdigest()[:16]
    return cache_root() / "card-rates" / f"{key}.json"


def _read_kept(file: Path) -> CardRates | None:
    """None if there is no such file, or it is damaged."""
    try:
        return CardRates(**json.loads(file.read_bytes()))
    except (OSError, ValueError, TypeError):
        return None


def _identity() -> tuple[str, str]:
    """Name of the GPU, and the versions that its rates may depend on."""
    import torch

    if not torch.cuda.is_available():
        return f"CPU, {platform.processor() or platform.machine()}", f"torch {torch.__version__}"
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        found = subprocess.run(query, capture_output=True, text=True, check=True).stdout
        driver = found.splitlines()[0].strip()
    except (OSError, subprocess.CalledProcessError, IndexError):
        driver = "of unknown version"
    return torch.cuda.get_device_name(), f"driver {driver}, torch {torch.__version__}"


def _measure() -> tuple[float, float]:
    """Bytes and operations per second."""
    import torch

    if not torch.cuda.is_available():
        return _measure_cpu()
    from benchmarks.plain_read import plain_read

    device = torch.device("cuda")
    bandwidth = plain_read(device, _READ_BYTES, 7) * 1e9
    rate = 0.0
    for size in _MATRIX_SIZES:
        a, b = (torch.randn(size, size, dtype=torch.bfloat16, device=device) for _ in range(2))
        out = torch.empty_like(a)
        seconds = median_of_runs(lambda a=a, b=b, out=out: torch.mm(a, b, out=out), 15)  # type: ignore[misc]
        rate = max(rate, 2 * size**3 / seconds)
    return bandwidth, rate


def _measure_cpu() -> tuple[float, float]:
    """Bytes and float32 operations per second, best of three."""
    import time

    import torch

    words = torch.ones(_CPU_READ_BYTES // 4)
    a = torch.randn(1024, 1024)
    seconds: dict[str, list[float]] = {"read": [], "multiply": []}
    for _ in range(3):
        for name, call in (("read", words.sum), ("multiply", lambda: a @ a)):
            begin = time.perf_counter()
            call()
            seconds[name].append(time.perf_counter() - begin)
    return _CPU_READ_BYTES / min(seconds["read"]), 2 * 1024**3 / min(seconds["multiply"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--fresh", action="store_true", help="measure even if rates are kept")
    parser.add_argument("--json", action="store_true", help="for other programs")
    options = parser.parse_args()
    rates = rates_of_this_process(options.fresh)
    print(json.dumps(asdict(rates)) if options.json else rates)


if __name__ == "__main__":
    main()
