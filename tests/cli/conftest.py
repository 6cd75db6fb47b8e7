"""A fixture that runs command lines."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.cli_fakes import Desk


@pytest.fixture
def desk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Desk:
    return Desk(tmp_path, monkeypatch)
