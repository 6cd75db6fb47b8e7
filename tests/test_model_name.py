"""A missing model is rejected before torch and transformers are imported."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import httpx
import pytest

from pagespec.errors import InvalidInputError
from pagespec.model_name import check_model_name
from tests.support.apart import run_apart

_PROGRAM = """
import json, sys
from pagespec import LLM, PagespecError
found = {}
for name in json.loads(sys.argv[1]):
    try:
        LLM(name)
    except PagespecError as error:
        found[name] = str(error)
heavy = [name for name in ("torch", "transformers") if name in sys.modules]
print(json.dumps([found, heavy]))
"""
_COMMAND = """
import sys
from typer.testing import CliRunner
from pagespec.cli.main import app
for command in (["serve", "--port", "0"], ["generate", "--prompt", "a"], ["chat"], ["bench"]):
    result = CliRunner().invoke(app, [*command, "--model", "./no-such-folder"])
    assert result.exit_code == 2, result.output
    assert "./no-such-folder" in result.stderr
    assert not {"torch", "transformers"} & set(sys.modules), command
print("refused")
"""


def refusals(*names: str) -> dict[str, str]:
    found, heavy = json.loads(run_apart("-c", _PROGRAM, json.dumps(names)))
    assert heavy == []
    assert set(found) == set(names)
    return dict(found)


def test_paths_that_are_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    (tmp_path / "empty").mkdir()
    (tmp_path / "adapter").mkdir()
    (tmp_path / "adapter" / "adapter_config.json").write_text("{}")
    (tmp_path / "file").write_text("")
    missing = ["/no/such", "./no", "../no", "~/no", "a/b/c", "no.gguf", "", "x" * 5000 + "/a/b"]
    names = [*missing, *(str(tmp_path / name) for name in ("empty", "adapter", "file", "a.gguf"))]
    found = refusals(*names, "no-such-model", "org/no-such-model", "no such", "a--b")
    assert "adapter" in found[str(tmp_path / "adapter")]
    assert "config.json" in found[str(tmp_path / "empty")]
    assert all(".gguf" in found[name] for name in missing)
    assert "HF_HUB_OFFLINE" in found["org/no-such-model"]


def test_commands_refuse_them_too() -> None:
    assert run_apart("-c", _COMMAND).split() == ["refused"]


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """A fake hub with the models of ``org``; yields the requested names."""
    asked: list[str] = []

    class Handler(BaseHTTPRequestHandler):
        def do_HEAD(self) -> None:
            asked.append(self.path)
            self.send_response(200 if self.path.startswith("/org/") else 404)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *_: object) -> None: ...

    server = HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{server.server_port}")
    yield asked
    server.shutdown()
    thread.join(10)


_CHECK = """
import sys
from pagespec.errors import InvalidInputError
from pagespec.model_name import check_model_name
for name in sys.argv[1:]:
    try:
        check_model_name(name)
        print("there")
    except InvalidInputError as error:
        print("not found" if "not found on the hub" in str(error) else str(error))
"""


def test_names_on_the_hub(hub: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    kept = tmp_path / "models--other--kept"
    (kept / "refs").mkdir(parents=True)
    (kept / "refs" / "main").write_text("abc")
    (kept / "snapshots" / "abc").mkdir(parents=True)
    (kept / "snapshots" / "abc" / "config.json").write_text("{}")
    said = run_apart("-c", _CHECK, "org/a", "other/a", "other/kept").splitlines()
    assert said == ["there", "not found", "there"]
    assert [path.split("/")[1] for path in hub] == ["org", "other"], "asked once each"


def test_an_unreachable_hub_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr("huggingface_hub.utils.get_session", _Unreachable)
    with pytest.raises(InvalidInputError, match=r"not in the hub's cache .* cannot be reached"):
        check_model_name("some/model")


class _Unreachable:
    def head(self, *_: object, **__: object) -> None:
        raise httpx.ConnectError("[Errno -2] Name or service not known")
