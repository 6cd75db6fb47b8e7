"""Fixtures of its ``tests/conftest.py`` that its text tests use."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from .runners import HfRunner, VllmRunner
from .stand_in import CONFIG, KERNELS, Missing, not_applicable

__all__ = [
    "HfRunner",
    "LocalAssetServer",
    "VllmRunner",
    "audio_assets",
    "caplog_vllm",
    "cli_config_file",
    "cli_config_file_with_model",
    "default_vllm_config",
    "dist_init",
    "example_long_prompts",
    "example_prompts",
    "example_system_message",
    "hf_runner",
    "image_assets",
    "image_url",
    "image_urls",
    "local_asset_server",
    "num_gpus_available",
    "sample_json_schema",
    "video_assets",
    "vllm_runner",
    "workspace_init",
]

LocalAssetServer = Missing("vllm.assets.LocalAssetServer")


@pytest.fixture(scope="session")
def vllm_runner() -> type[VllmRunner]:
    return VllmRunner


@pytest.fixture(scope="session")
def hf_runner() -> type[HfRunner]:
    return HfRunner


def _lines(name: str) -> list[str]:
    return (Path("tests/prompts") / name).read_text().splitlines(keepends=True)


@pytest.fixture
def example_prompts() -> list[str]:
    return _lines("example.txt")


@pytest.fixture
def example_long_prompts() -> list[str]:
    return _lines("summary.txt")


@pytest.fixture
def example_system_message() -> str:
    return Path("tests/system_messages/sonnet3.5_nov2024.txt").read_text()


@pytest.fixture
def sample_json_schema() -> dict[str, Any]:
    name = {"type": "string", "maxLength": 8}
    properties = {"name": name, "age": {"type": "integer", "maximum": 120}}
    return {"type": "object", "properties": properties, "required": ["name", "age"]}


@pytest.fixture
def caplog_vllm(caplog: Any) -> Any:
    return caplog


@pytest.fixture
def num_gpus_available() -> int:
    return 1


@pytest.fixture
def cli_config_file() -> Path:
    return Path("tests/config/test_config.yaml")


@pytest.fixture
def cli_config_file_with_model() -> Path:
    return Path("tests/config/test_config_with_model.yaml")


def _unapplied(name: str, feature: str) -> Any:
    """A fixture that ends its tests as not applicable."""

    @pytest.fixture(scope="session", name=name)
    def fixture() -> None:
        not_applicable(feature, name)

    return fixture


_MEDIA = "images and audio"
image_assets = _unapplied("image_assets", _MEDIA)
video_assets = _unapplied("video_assets", _MEDIA)
audio_assets = _unapplied("audio_assets", _MEDIA)
image_url = _unapplied("image_url", _MEDIA)
image_urls = _unapplied("image_urls", _MEDIA)
local_asset_server = _unapplied("local_asset_server", _MEDIA)
default_vllm_config = _unapplied("default_vllm_config", CONFIG)
dist_init = _unapplied("dist_init", KERNELS)
workspace_init = _unapplied("workspace_init", KERNELS)
