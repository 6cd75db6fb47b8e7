"""Names of vLLM that only its tests need: the machine, and helpers of its test code."""

from __future__ import annotations

import contextlib
import gc
import logging
import random
import socket
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, Literal

import pagespec


class Platform:
    """Answers as a machine with one large NVIDIA GPU, so that no test is left out for the machine.

    What computes on a GPU in its tests is internal and does not run in any case.
    """

    device_type = "cuda"
    device_name = "cuda"

    def __getattr__(self, name: str) -> Any:
        if name.startswith("is_"):
            return lambda *_, **__: name in ("is_cuda", "is_cuda_alike")
        if name.startswith(("supports_", "has_")):
            return lambda *_, **__: True
        raise AttributeError(name)

    def device_count(self) -> int:
        return 1

    def get_device_total_memory(self, _device: int = 0) -> int:
        return 80 << 30

    def has_device_capability(self, _wanted: object) -> bool:
        return True

    def get_device_capability(self) -> tuple[int, int]:
        return (9, 0)


class Environment:
    """``vllm.envs``: no variable is set."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("VLLM_"):
            return None
        raise AttributeError(name)


@contextlib.contextmanager
def set_default_torch_num_threads(_count: int | None = None) -> Iterator[None]:
    yield


def set_random_seed(seed: int | None) -> None:
    import torch

    if seed is not None:
        random.seed(seed)
        torch.manual_seed(seed)


class ModelConfig:
    """Sizes of the model that stands for a model of vLLM's tests."""

    def __init__(self, model: str, **_: object) -> None:
        from transformers import AutoConfig

        self._config = AutoConfig.from_pretrained(model)

    def get_vocab_size(self) -> int:
        return int(self._config.vocab_size)

    def get_hidden_size(self) -> int:
        return int(self._config.hidden_size)


class OutputProcessor:
    """What tests ask of ``AsyncLLM.output_processor``."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine

    def has_unfinished_requests(self) -> bool:
        # The engine's thread ends an aborted request in its next step, vLLM's front end at once.
        until = time.monotonic() + 5
        while self._engine.num_live_requests and time.monotonic() < until:
            time.sleep(0.01)
        return bool(self._engine.num_live_requests)


def downloaded(name: str, *_: object, **__: object) -> str:
    """The folder of the model that stands for another."""
    from . import models

    return models.model_of(name)


def open_port() -> int:
    """A free TCP port of this machine."""
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        port: int = one.getsockname()[1]
        return port


def clean_up(*_: object, **__: object) -> None:
    gc.collect()


platform = Platform()
NAMES: dict[str, Any] = {
    "vllm.config.ModelConfig": ModelConfig,
    "vllm.config.model.LogprobsMode": Literal[
        "raw_logits", "raw_logprobs", "processed_logits", "processed_logprobs"
    ],
    "vllm.model_executor.model_loader.weight_utils.download_weights_from_hf": downloaded,
    "vllm.version": SimpleNamespace(_prev_minor_version=lambda: pagespec.__version__),
    "vllm.version.__version__": pagespec.__version__,
    "vllm.platforms.current_platform": platform,
    "vllm.envs": Environment(),
    "vllm.envs.disable_envs_cache": lambda: None,
    "vllm.logger.init_logger": logging.getLogger,
    "vllm.triton_utils.HAS_TRITON": False,
    "vllm.utils.network_utils.get_open_port": open_port,
    "vllm.utils.torch_utils.set_default_torch_num_threads": set_default_torch_num_threads,
    "vllm.utils.torch_utils.set_random_seed": set_random_seed,
    "vllm.distributed.cleanup_dist_env_and_memory": clean_up,
    "vllm._aiter_ops.is_aiter_found": lambda: False,
    "vllm._aiter_ops.is_aiter_found_and_supported": lambda: False,
}
