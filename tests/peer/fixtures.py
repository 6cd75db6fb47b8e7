"""Fixtures of its ``tests/conftest.py`` that its text tests use."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from .runners import HfRunner, VllmRunner
from .stand_in import Missing, not_applicable

__all__ = [
    "HfRunner",
    "LocalAssetServer",
    "VllmRunner",
    "audio_assets",
    "caplog_vllm",
    "cli_config_file",
    "cli_config_file_with_model",
    "example_long_prompts",
    "example_prompts",
    "hf_runner",
    "image_assets",
    "image_urls",
    "local_asset_server",
    "num_gpus_available",
    "vllm_runner",
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


@pytest.fixture
def image_assets() -> None:
    not_applicable("images and audio", "image_assets")


@pytest.fixture
def audio_assets() -> None:
    not_applicable("images and audio", "audio_assets")


@pytest.fixture(scope="session")
def local_asset_server() -> None:
    not_applicable("images and audio", "local_asset_server")


@pytest.fixture
def image_urls() -> None:
    not_applicable("images and audio", "image_urls")
