"""Settings that are rejected before any process is started."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from pagespec import LLM, EngineError, InvalidInputError, UnsupportedModelError
from pagespec.distributed import launch
from pagespec.engine.config import EngineConfig
from pagespec.kernels.collectives import boxes
from pagespec.runner.cpu import threads as cpu_threads
from tests.support.models import tiny_model

Refuse = Callable[..., InvalidInputError]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    tiny_model("llama", num_attention_heads=4).save_pretrained(path)
    return path


class Started:
    """Replaces the workers: records what they were sent, and ends them."""

    def __init__(self, folder: Path) -> None:
        self._file = folder / "sent"
        self.worker = folder / "worker"
        read = "size=$(head -c 8 | od -An -t u8); head -c $size"
        self.worker.write_text(f"#!/bin/sh\n({read}; echo) >> '{self._file}'\n")
        self.worker.chmod(0o755)

    @property
    def settings(self) -> list[dict[str, Any]]:
        lines = self._file.read_text().splitlines() if self._file.exists() else []
        return [json.loads(line) for line in lines]


@pytest.fixture(autouse=True)
def started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Started]:
    (tmp_path / "python").mkdir()
    started = Started(tmp_path / "python")
    monkeypatch.setattr(sys, "executable", str(started.worker))
    yield started
    assert not dist.is_initialized()


@pytest.fixture
def refuse(started: Started) -> Iterator[Refuse]:
    """Rejections before anything is started."""

    def refuse(what: str, model: Any, **settings: Any) -> InvalidInputError:
        with pytest.raises(InvalidInputError, match=what) as caught:
            LLM(model, **{"device": "cpu", "tensor_parallel_size": 2, **settings})
        return caught.value

    yield refuse
    assert started.settings == []


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Four GPUs with peer access, except for the pairs ``apart``."""
    found = SimpleNamespace(apart=set())
    fakes: dict[str, Any] = {
        "device_count": lambda: 4,
        "is_available": lambda: True,
        "can_device_access_peer": lambda a, b: frozenset({a, b}) not in found.apart,
    }
    for name, fake in fakes.items():
        monkeypatch.setattr(torch.cuda, name, fake)
    return found


@pytest.mark.parametrize("value", [0, -1, "2", True, 2.0, [2], 65, 1 << 40])
def test_no_number_of_ranks(value: Any, folder: Path, refuse: Refuse) -> None:
    error = refuse("tensor_parallel_size = .*must be ", folder, tensor_parallel_size=value)
    assert (error.field, error.value) == ("tensor_parallel_size", value)


def test_heads_that_cannot_be_divided(folder: Path, tmp_path: Path, refuse: Refuse) -> None:
    refuse("= 3: does not divide the 4 heads of q_proj .llama", folder, tensor_parallel_size=3)
    tiny_model("llama", num_attention_heads=12, num_key_value_heads=3).save_pretrained(tmp_path)
    refuse("= 4: does not divide the 3 heads of k_proj", tmp_path, tensor_parallel_size=4)


@pytest.mark.parametrize(("arch", "size"), [("phi3", 4), ("gpt2", 3), ("llama", 6), ("olmo2", 4)])
def test_heads_are_not_checked_if_they_stay_whole(
    arch: str, size: int, tmp_path: Path, started: Started
) -> None:
    tiny_model(arch).config.save_pretrained(tmp_path)
    with pytest.raises(EngineError, match="has ended"):
        LLM(tmp_path, device="cpu", tensor_parallel_size=size)


def test_ranks_are_sent_the_number_that_the_machine_has_now(
    folder: Path, started: Started, cpu_machine: Callable[..., None]
) -> None:
    """Not the number to which an earlier engine lowered this process."""
    cpu_machine(8, lambda number: 1.0 / number)
    torch.set_num_threads(6)
    cpu_threads.step_threads(None)
    for fallen, given in ((1, None), (6, None), (1, 3)):
        torch.set_num_threads(fallen)
        with pytest.raises(EngineError, match=r"rank 1 .* has ended"):
            LLM(folder, device="cpu", tensor_parallel_size=2, threads=given)
        assert torch.get_num_threads() == started.settings[-1]["num_threads"]
    assert [settings["num_threads"] for settings in started.settings] == [4, 4, 3]


def test_a_model_in_memory(refuse: Refuse) -> None:
    error = refuse("must be 1 for a model in memory", tiny_model("llama"))
    assert error.field == "tensor_parallel_size"


def test_a_model_that_is_not_there(tmp_path: Path, refuse: Refuse) -> None:
    refuse("existing folder", tmp_path / "none")
    refuse("config.json", tmp_path)
    (tmp_path / "config.json").write_text("{")
    refuse("must have a readable config.json", tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "abacus"}))
    with pytest.raises(UnsupportedModelError, match="abacus"):
        LLM(tmp_path, device="cpu", tensor_parallel_size=2)


@pytest.mark.parametrize("method", ["draft_model", "eagle3"])
def test_a_drafter_that_is_not_there(
    method: str, folder: Path, tmp_path: Path, refuse: Refuse
) -> None:
    config = {"method": method, "model": str(tmp_path / "none")}
    refuse("existing folder", folder, speculative_config=config)


@pytest.mark.parametrize(
    "given",
    [
        {"method": "ngram", "prompt_lookup_max": 3},
        {"method": "suffix", "num_speculative_tokens": 2},
        {"method": "mtp", "draft_tensor_parallel_size": 1},
        {"method": "eagle3", "model": "a/b"},
    ],
)
def test_ranks_are_sent_the_settings_of_draft_tokens(given: dict[str, Any]) -> None:
    """They determine the sizes of steps on a GPU."""
    config = EngineConfig(speculative_config=given, device="cpu")
    sent = json.loads(json.dumps(config.build_arguments()))
    assert EngineConfig(**sent).speculation == config.speculation


def test_devices_that_are_not_there(folder: Path, refuse: Refuse) -> None:
    refuse("0 GPUs are visible" if not torch.cuda.is_available() else "", folder, device="cuda:99")
    refuse("must be", folder, device="tpu")


@pytest.mark.usefixtures("gpus")
def test_the_first_gpus_are_taken(folder: Path, refuse: Refuse) -> None:
    for device in ("cuda:0", "cuda:1"):
        error = refuse("must be cuda: 2 ranks take the first GPUs", folder, device=device)
        assert (error.field, error.value) == ("device", device)
    for device in ("cuda", "auto"):
        error = refuse("at most the 4 GPUs", folder, device=device, tensor_parallel_size=8)
        assert error.field == "tensor_parallel_size"
    assert launch._devices(EngineConfig(device="cuda"), 3) == [
        torch.device("cuda", i) for i in range(3)
    ]


def test_ranks_that_reach_each_other_push_into_the_memory_of_peers(
    gpus: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    devices = [torch.device("cuda", rank) for rank in range(3)]
    assert launch._has_peer_access(devices)
    assert not launch._has_peer_access([torch.device("cpu")] * 2)
    gpus.apart.add(frozenset(devices[1:]))
    assert not launch._has_peer_access(devices)
    gpus.apart.clear()
    monkeypatch.setattr(boxes, "has_met", lambda: True)
    assert not launch._has_peer_access(devices)


def test_a_process_of_another_group(folder: Path) -> None:
    dist.init_process_group(store=dist.HashStore(), rank=0, world_size=1)
    try:
        with pytest.raises(InvalidInputError, match=r"torch.distributed is in use in this process"):
            LLM(folder, device="cpu", tensor_parallel_size=2)
    finally:
        dist.destroy_process_group()
