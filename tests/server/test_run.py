"""The server process: how it starts, and how it ends in the middle of answers."""

from __future__ import annotations

import io
import json
import logging
import signal
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import httpx
import pytest
from typer.testing import CliRunner

from pagespec.cli.main import app
from pagespec.server.requests import RequestIds
from tests.server.serve_content import STEP_S, Process, server_process
from tests.support.content_llm import content_llm
from tests.support.server import serving

NUM_TOKENS = 60
BODY = {"prompt": [0, 0], "max_tokens": NUM_TOKENS, "ignore_eos": True, "seed": 1}


class Stream:
    """An answer that is being streamed."""

    def __init__(self, server: Process, **more: Any) -> None:
        self._http = httpx.Client(base_url=server.url, timeout=30)
        body = {**BODY, "stream": True, "return_token_ids": True, **more}
        request = self._http.build_request("POST", "/v1/completions", json=body)
        self._answer = self._http.send(request, stream=True)
        assert self._answer.status_code == 200
        self._lines = self._answer.iter_lines()
        self.events = [next(self._lines)]

    def read(self) -> list[dict[str, Any]]:
        """The choices to the end."""
        self.events += self._lines
        events = [line.removeprefix("data: ") for line in self.events if line]
        assert events.pop() == "[DONE]"
        return [json.loads(event)["choices"][0] for event in events]


def tokens_of(choices: list[dict[str, Any]]) -> int:
    return sum(len(choice["token_ids"] or ()) for choice in choices)


def post(server: Process) -> httpx.Response:
    return httpx.post(f"{server.url}/v1/completions", json=BODY, timeout=30)


def test_a_signal_in_mid_stream_lets_it_end(tmp_path: Path) -> None:
    with server_process(tmp_path / "log") as server:
        stream = Stream(server)
        assert httpx.get(f"{server.url}/health").status_code == 200
        server.process.send_signal(signal.SIGTERM)
        began = time.monotonic()
        while httpx.get(f"{server.url}/health").status_code != 503:
            assert time.monotonic() - began < 0.5
        assert httpx.get(f"{server.url}/liveness").status_code == 200
        refused = post(server)
        assert (refused.status_code, refused.headers["retry-after"]) == (503, "5")
        assert refused.json()["error"]["type"] == "ServiceUnavailableError"
        assert server.process.poll() is None, "the stream should still run"
        choices = stream.read()
        assert tokens_of(choices) == NUM_TOKENS
        assert choices[-1]["finish_reason"] == "length"
        assert server.process.wait(10) == 0
        assert "running requests: 1" in server.log.read_text()


def test_a_second_signal_ends_it(tmp_path: Path) -> None:
    with server_process(tmp_path / "log") as server:
        stream = Stream(server, max_tokens=400)
        server.process.send_signal(signal.SIGINT)
        time.sleep(0.3)
        assert server.process.poll() is None
        assert httpx.get(f"{server.url}/health").status_code == 503
        began = time.monotonic()
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(10) == 128 + signal.SIGTERM
        assert time.monotonic() - began < 400 * STEP_S / 2
        assert stream.read()[-1]["finish_reason"] == "abort"
        assert "Traceback" not in server.log.read_text()


def test_what_runs_too_long_is_aborted(tmp_path: Path) -> None:
    with server_process(tmp_path / "log", "--drain-timeout", "0.3") as server:
        stream = Stream(server, max_tokens=400)
        server.process.send_signal(signal.SIGTERM)
        choices = stream.read()
        assert choices[-1]["finish_reason"] == "abort"
        assert 0 < tokens_of(choices) < 400
        assert server.process.wait(10) == 0
        assert "are aborted: 1" in server.log.read_text()


def test_an_idle_server_ends_at_once_also_with_a_page_that_watches(tmp_path: Path) -> None:
    with (
        server_process(tmp_path / "log") as server,
        httpx.stream("GET", f"{server.url}/live/stream", timeout=30) as watching,
    ):
        assert watching.status_code == 200
        began = time.monotonic()
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(10) == 0
        assert time.monotonic() - began < 3


@pytest.fixture
def used_port() -> Iterator[int]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield listener.getsockname()[1]


def refused(*options: str) -> str:
    """The line that says why."""
    result = CliRunner().invoke(app, ["serve", "--model", "/nowhere", *options])
    assert result.exit_code == 2
    return result.stderr.removeprefix("pagespec: error: ").removesuffix("\n")


def test_an_address_in_use_is_refused_before_the_model_is_loaded(used_port: int) -> None:
    where = f"cannot listen at 127.0.0.1:{used_port}: Address already in use"
    assert refused("--port", str(used_port)).endswith(where)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--salt-per-key"], "salt_per_key = True: needs an API key"),
        (["--ssl-keyfile", "x"], "ssl_certfile = None: must be given together with ssl_keyfile"),
        (["--ssl-keyfile", "/no", "--ssl-certfile", "/no"], "No such file or directory"),
        (["--max-num-requests", "0"], "max_num_requests = 0: must be an integer of 1 or more"),
    ],
)
def test_options_are_refused_in_one_line(options: list[str], message: str) -> None:
    assert refused(*options).endswith(message)


def test_a_unix_socket_and_json_lines(tmp_path: Path) -> None:
    path, log = tmp_path / "socket", tmp_path / "log"
    with server_process(log, "--uds", str(path), "--log-json", "--api-key", "one") as server:
        assert server.url == f"unix:{path}"
        transport = httpx.HTTPTransport(uds=str(path))
        with httpx.Client(transport=transport, base_url="http://test") as http:
            assert http.get("/v1/models").status_code == 401
            headers = {"Authorization": "Bearer one", "X-Request-Id": "mine"}
            assert http.get("/v1/models?secret=1", headers=headers).status_code == 200
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(10) == 0
    assert not path.exists()
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    assert {"time", "level", "logger", "message"} <= set.intersection(*map(set, lines))
    (access,) = [line for line in lines if line.get("request_id") == "mine"]
    assert (access["method"], access["path"], access["status"]) == ("GET", "/v1/models", 200)
    assert "secret" not in log.read_text()


def test_each_line_of_the_log_has_the_id_of_its_request(tmp_path: Path) -> None:
    for options in [], ["--log-json"]:
        with server_process(tmp_path / "log", *options) as server:
            ids = []
            for path, given in ("/health", "mine"), ("/v1/models", "two"), ("/nothing", None):
                headers = {} if given is None else {"X-Request-Id": given}
                answer = httpx.get(server.url + path, headers=headers)
                ids.append(answer.headers["x-request-id"])
            assert ids[:2] == ["mine", "two"]
            until = time.monotonic() + 10
            while "/nothing" not in server.log.read_text() and time.monotonic() < until:
                time.sleep(0.02)
        for request_id in ids:
            lines = [line for line in server.log.read_text().splitlines() if request_id in line]
            assert len(lines) == 1
            if options:
                assert json.loads(lines[0])["request_id"] == request_id
        assert not [line for line in server.log.read_text().splitlines() if "[None]" in line]


def test_what_goes_wrong_is_logged_with_the_id_of_its_request() -> None:
    llm = content_llm()
    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    handler.setFormatter(logging.Formatter("%(request)s%(message)s"))
    handler.addFilter(RequestIds())
    logger = logging.getLogger("pagespec")
    logger.addHandler(handler)
    try:
        with serving(llm) as url, mock.patch.object(llm.reader, "read", side_effect=OSError("x")):
            for path in "/v1/completions", "/inference/v1/generate":
                body = {"prompt": [0]} if path == "/v1/completions" else {"token_ids": [0]}
                answer = httpx.post(url + path, json=body, headers={"X-Request-Id": path[1:4]})
                assert answer.status_code == 500
    finally:
        logger.removeHandler(handler)
    said = stream.getvalue()
    for request_id in "v1/", "inf":
        assert f"[{request_id}] a request failed" in said
