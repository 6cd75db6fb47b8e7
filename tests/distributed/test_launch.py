"""What is refused before any process is started."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from pagespec import LLM, InvalidInputError, UnsupportedModelError
from pagespec.distributed import launch
from pagespec.distributed.workers import Workers
from pagespec.engine.config import EngineConfig
from pagespec.kernels.collectives import boxes
from pagespec.runner import cpu_threads
from tests.support.models import tiny_model


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    tiny_model("llama", num_attention_heads=4).save_pretrained(path)
    return path


@pytest.fixture(autouse=True)
def _starts_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def start(*_: Any, **__: Any) -> None:
        raise AssertionError("a process was started")

    monkeypatch.setattr(subprocess, "Popen", start)
    monkeypatch.setattr(launch, "make_store", start)


def refuse(what: str, model: Any, **settings: Any) -> InvalidInputError:
    with pytest.raises(InvalidInputError, match=what) as caught:
        LLM(model, **{"device": "cpu", "tensor_parallel_size": 2, **settings})
    assert not dist.is_initialized()
    return caught.value


@pytest.mark.parametrize("value", [0, -1, "2", True, 2.0, None, [2], 65, 1 << 40])
def test_no_number_of_ranks(value: Any, folder: Path) -> None:
    error = refuse("tensor_parallel_size = .*must be ", folder, tensor_parallel_size=value)
    assert (error.field, error.value) == ("tensor_parallel_size", value)


def test_heads_that_cannot_be_divided(folder: Path, tmp_path: Path) -> None:
    refuse("= 3: does not divide the 4 heads of q_proj .llama", folder, tensor_parallel_size=3)
    tiny_model("llama", num_attention_heads=12, num_key_value_heads=3).save_pretrained(tmp_path)
    refuse("= 4: does not divide the 3 heads of k_proj", tmp_path, tensor_parallel_size=4)


@pytest.mark.parametrize(("arch", "size"), [("phi3", 4), ("gpt2", 3), ("llama", 6), ("olmo2", 4)])
def test_heads_are_not_looked_at_where_they_stay_whole(
    arch: str, size: int, tmp_path: Path
) -> None:
    tiny_model(arch).config.save_pretrained(tmp_path)
    with pytest.raises(AssertionError, match="started"):
        LLM(tmp_path, device="cpu", tensor_parallel_size=size)


def test_ranks_are_sent_the_number_that_the_machine_has_now(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not the number to which an engine before has lowered this process."""
    before = torch.get_num_threads()
    cpu_threads.torchs_number.cache_clear()
    cpu_threads.shared_threads.cache_clear()
    monkeypatch.setattr(cpu_threads, "usable_cores", lambda: 8)
    monkeypatch.setattr(cpu_threads, "measured", lambda number: 1.0 / number)
    sent: list[dict[str, Any]] = []

    class Started(Exception):
        """The ranks have what they are to build."""

    def send(_: Workers, settings: dict[str, Any]) -> None:
        sent.append(settings)
        raise Started

    monkeypatch.setattr(launch, "make_store", lambda _: SimpleNamespace(port=1))
    monkeypatch.setattr(Workers, "__init__", lambda *_: None)
    monkeypatch.setattr(Workers, "send_settings", send)
    monkeypatch.setattr(Workers, "reason_of", lambda _, error: error)
    monkeypatch.setattr(Workers, "end", lambda _: None)
    try:
        torch.set_num_threads(6)
        cpu_threads.step_threads(None)
        for fallen, given in ((1, None), (6, None), (1, 3)):
            torch.set_num_threads(fallen)
            with pytest.raises(Started):
                LLM(folder, device="cpu", tensor_parallel_size=2, threads=given)
            assert torch.get_num_threads() == sent[-1]["num_threads"]
    finally:
        torch.set_num_threads(before)
        cpu_threads.torchs_number.cache_clear()
        cpu_threads.shared_threads.cache_clear()
    assert [settings["num_threads"] for settings in sent] == [4, 4, 3]


def test_a_model_in_memory() -> None:
    error = refuse("must be 1 for a model in memory", tiny_model("llama"))
    assert error.field == "tensor_parallel_size"


def test_a_model_that_is_not_there(tmp_path: Path) -> None:
    refuse("existing folder", tmp_path / "none")
    refuse("config.json", tmp_path)
    (tmp_path / "config.json").write_text("{")
    refuse("must have a readable config.json", tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "abacus"}))
    with pytest.raises(UnsupportedModelError, match="abacus"):
        LLM(tmp_path, device="cpu", tensor_parallel_size=2)


def test_devices_that_are_not_there(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    refuse("0 GPUs are visible" if not torch.cuda.is_available() else "", folder, device="cuda:99")
    refuse("must be", folder, device="tpu")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for device in ("cuda:0", "cuda:1"):
        error = refuse("must be cuda: 2 ranks take the first GPUs", folder, device=device)
        assert (error.field, error.value) == ("device", device)
    for device in ("cuda", "auto"):
        error = refuse("at most the 4 GPUs", folder, device=device, tensor_parallel_size=8)
        assert error.field == "tensor_parallel_size"
    assert launch._devices(EngineConfig(device="cuda"), 3) == [
        torch.device("cuda", i) for i in range(3)
    ]


def test_who_pushes_into_the_memory_of_peers(monkeypatch: pytest.MonkeyPatch) -> None:
    gpus = [torch.device("cuda", rank) for rank in range(3)]
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda *_: True)
    assert launch._has_peer_access(gpus)
    assert not launch._has_peer_access([torch.device("cpu")] * 2)
    with monkeypatch.context() as patch:
        patch.setattr(torch.cuda, "can_device_access_peer", lambda a, b: {a, b} != {*gpus[1:]})
        assert not launch._has_peer_access(gpus)
    monkeypatch.setattr(boxes, "has_met", lambda: True)
    assert not launch._has_peer_access(gpus)


def test_a_process_of_another_group(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    with pytest.raises(InvalidInputError, match=r"torch.distributed is in use in this process"):
        LLM(folder, device="cpu", tensor_parallel_size=2)
