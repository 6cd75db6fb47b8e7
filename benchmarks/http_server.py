"""``pagespec serve`` or ``vllm serve`` in a separate process, started as its users start it.

vLLM's folder (``--peer``) is the result of ``pip install --target``, and becomes its whole
``PYTHONPATH``.
"""

from __future__ import annotations

import json
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from benchmarks.http_load import HOST
from benchmarks.peer import KEPT_BYTECODE

MODEL = "model"  # the model's name in requests
_GLANCE_S = 0.05  # between two checks whether a server is up
_STOP_S = 20.0
_LAST_LINES = 40
_ASK_MACHINE = (
    "import torch; g = torch.cuda.is_available(); "
    "print('GPU', torch.cuda.get_device_name() if g else 'none (CPU)', ', torch', "
    "torch.__version__)"
)


class ServerError(RuntimeError):
    """A server did not start, or ended; with the end of its log."""


@dataclass(frozen=True)
class Engine:
    """How a server is started.

    Attributes:
        arguments: of Python, except host and port.
        environment: variables added to this process's own.
    """

    name: str
    arguments: list[str]
    environment: dict[str, str]

    def machine(self) -> str:
        """The GPU and torch as seen by this engine's process."""
        command = [sys.executable, "-c", _ASK_MACHINE]
        environment = {**os.environ, **self.environment}
        told = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        return told.stdout.strip().replace(" ,", ",") or "unknown"


@dataclass(frozen=True)
class Server:
    """A server that accepts requests.

    Attributes:
        start_s: from the start of its process until it accepted requests.
    """

    port: int
    version: str
    start_s: float


def pagespec_engine(
    folder: Path, max_num_seqs: int, max_model_len: int, options: list[str]
) -> Engine:
    arguments = ["-m", "pagespec.cli", "serve", "--model", str(folder), "--load-format", "dummy"]
    arguments += ["--served-model-name", MODEL, "--no-access-log", "--no-prefix-caching"]
    arguments += ["--max-num-seqs", str(max_num_seqs), "--max-model-len", str(max_model_len)]
    return Engine("pagespec", arguments + options, {"HF_HUB_OFFLINE": "1"})


def vllm_engine(
    site: Path, folder: Path, max_num_seqs: int, max_model_len: int, options: list[str]
) -> Engine:
    arguments = ["-m", "vllm.entrypoints.cli.main", "serve", str(folder)]
    arguments += ["--load-format", "dummy", "--served-model-name", MODEL]
    arguments += ["--disable-uvicorn-access-log", "--no-enable-prefix-caching"]
    arguments += ["--max-num-seqs", str(max_num_seqs), "--max-model-len", str(max_model_len)]
    cache = site.resolve().with_name(f"{site.name}-cache")
    environment = {
        "PYTHONPATH": str(site.resolve()),
        "VLLM_CACHE_ROOT": str(cache),
        "TORCHINDUCTOR_CACHE_DIR": str(cache / "inductor"),
        "TRITON_CACHE_DIR": str(cache / "triton"),
        # A machine without a network, and without FlashInfer and DeepGEMM.
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_OFFLINE": "1",
        "VLLM_HOST_IP": HOST,
        "GLOO_SOCKET_IFNAME": "lo",
        "NCCL_SOCKET_IFNAME": "lo",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_DO_NOT_TRACK": "1",
        "VLLM_PLUGINS": "",
        "VLLM_USE_FLASHINFER_SAMPLER": "0",
        "VLLM_USE_DEEP_GEMM": "0",
        "TOKENIZERS_PARALLELISM": "false",
        **KEPT_BYTECODE,
    }
    return Engine("vLLM", arguments + options, environment)


@contextmanager
def running(engine: Engine, limit_s: float, log: Path) -> Iterator[Server]:
    """Start a server, wait until it accepts requests, and end it with all its processes.

    Args:
        limit_s: the most seconds for its start.
        log: file for its output.

    Raises:
        ServerError: see that class.
    """
    port = _free_port()
    listening = ["--host", HOST, "--port", str(port)]
    with tempfile.TemporaryDirectory() as elsewhere, log.open("wb") as output:
        begin = time.monotonic()
        process = subprocess.Popen(
            [sys.executable, *engine.arguments, *listening],
            env={**os.environ, "PYTHONUNBUFFERED": "1", **engine.environment},
            # Otherwise Python would import from the working directory first.
            cwd=elsewhere if engine.name == "vLLM" else None,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            while not _is_up(port):
                if process.poll() is not None:
                    raise ServerError(_failed(engine, f"ended with {process.returncode}", log))
                if time.monotonic() - begin > limit_s:
                    raise ServerError(_failed(engine, f"is not up after {limit_s} s", log))
                time.sleep(_GLANCE_S)
            start_s = time.monotonic() - begin
            with urllib.request.urlopen(f"http://{HOST}:{port}/version", timeout=10) as answer:
                version = str(json.load(answer)["version"])
            yield Server(port, version, start_s)
            if process.poll() is not None:
                raise ServerError(_failed(engine, f"ended with {process.returncode}", log))
            process.send_signal(signal.SIGTERM)
            with suppress(subprocess.TimeoutExpired):
                process.wait(_STOP_S)
        finally:
            # Also the processes that it started: the GPU must be free again.
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _free_port() -> int:
    """Below the ports that the system assigns to clients, one of which could take it before it is
    used."""
    while True:
        port = random.SystemRandom().randrange(20_000, 32_000)
        with suppress(OSError), socket.create_server((HOST, port)):
            return port


def _is_up(port: int) -> bool:
    try:
        with urllib.request.urlopen(f"http://{HOST}:{port}/health", timeout=5) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False


def _failed(engine: Engine, how: str, log: Path) -> str:
    lines = log.read_text(errors="replace").splitlines()[-_LAST_LINES:]
    return "\n".join([f"{engine.name}'s server {how}:", *lines])


def write_tokenizer(folder: Path, num_tokens: int) -> None:
    """A tokenizer in which every token is a separate word, so that each has text to send.

    Random weights choose all tokens with equal probability. Most tokens of a real tokenizer are
    parts of characters or beyond its vocabulary: some chunks would have no text, and would not be
    sent.
    """
    from tokenizers import Tokenizer, decoders, models
    from transformers import PreTrainedTokenizerFast

    words = {f"Ġ{_letters(number)}": number for number in range(num_tokens)}
    tokenizer = Tokenizer(models.BPE(vocab=words, merges=[]))
    tokenizer.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(folder)


def _letters(number: int) -> str:
    text = ""
    while number:
        number, digit = divmod(number, 26)
        text += chr(ord("a") + digit)
    return text.ljust(4, "a")  # the last letter of a longer word is none
