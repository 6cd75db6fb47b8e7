"""``RemoteOpenAIServer``: ``pagespec serve`` with the flags that a test gives to ``vllm serve``."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from . import models, run, stand_in
from .own_names import open_port

_START_S = 120.0
# Unless a test gives another: an answer without ``max_tokens`` may fill the context.
_MAX_MODEL_LEN = 1536
# With one of these flags every test of the file is for a feature that pagespec refuses.
_OF_FEATURES = {
    "--api-server-count": "several API servers (--api-server-count)",
    "--enable-prompt-embeds": "prompt embeddings",
    "--shutdown-timeout": "a time to finish requests at SIGTERM (--shutdown-timeout)",
    "--limit-mm-per-prompt": "images and audio",
    "--tool-server": "tool server (MCP)",
    "--enable-sleep-mode": "sleep mode",
    "--enable-return-routed-experts": "routed experts",
    "--worker-extension-cls": "extensions of workers",
}
_FLAGS = {
    "attention": "--attention-backend",
    "reasoning_format": "--reasoning-parser",
    "tool_call_format": "--tool-call-parser",
}
_REFUSED = (
    r"error: ([a-z_]+) = ",
    r"No such option: (--[a-z-]+)",
    r"(--[a-z-]+) = .*?(?:is not supported|must )",
)


class _RefusedFlag(Exception):
    """``pagespec serve`` refused a flag."""


def _without(flags: list[str], refused: str) -> list[str]:
    found: list[str] = []
    rest = iter(range(len(flags)))
    for i in rest:
        name = flags[i].partition("=")[0].partition(".")[0]
        if name.lstrip("-").replace("-", "_") != refused.lstrip("-").replace("-", "_"):
            found.append(flags[i])
        elif "=" not in flags[i]:
            while i + 1 < len(flags) and not flags[i + 1].startswith("-"):
                i = next(rest)
    if len(found) == len(flags):
        raise RuntimeError(f"pagespec serve refused {refused}, which was not given")
    return found


class RemoteOpenAIServer:
    """A server in a process of its own; its log is in ``log``."""

    DUMMY_API_KEY = "token-abc123"

    def __init__(
        self,
        model: str,
        vllm_serve_args: list[str],
        *,
        env_dict: dict[str, str] | None = None,
        seed: int | None = 0,
        auto_port: bool = True,
        max_wait_seconds: float | None = None,
        override_hf_configs: dict[str, Any] | None = None,
    ) -> None:
        given = [str(each) for each in vllm_serve_args]
        for flag, feature in _OF_FEATURES.items():
            if flag in given:
                stand_in.not_applicable(feature, flag)
        self.model = models.model_of(model)
        self.show_hidden_metrics = any("show-hidden-metrics" in flag for flag in given)
        self.uds = given[given.index("--uds") + 1] if "--uds" in given else None
        self.host = given[given.index("--host") + 1] if "--host" in given else "127.0.0.1"
        self.port = int(given[given.index("--port") + 1]) if "--port" in given else open_port()
        flags = ["--model", self.model, *_replaced(given)]
        if "--served-model-name" not in given:
            flags += ["--served-model-name", model]
        if "--port" not in given and not self.uds:
            flags += ["--port", str(self.port)]
        if seed is not None and "--seed" not in given:
            flags += ["--seed", str(seed)]
        if "--max-model-len" not in flags:
            flags += ["--max-model-len", str(_MAX_MODEL_LEN)]
        if override_hf_configs:
            flags += ["--hf-overrides", json.dumps(override_hf_configs)]
        self.log = Path(tempfile.mkstemp(prefix="peer-", suffix=".log")[1])
        self.proc: subprocess.Popen[bytes]
        # As the import line: VLLM_API_KEY is PAGESPEC_API_KEY here.
        named = {key.replace("VLLM_", "PAGESPEC_"): one for key, one in (env_dict or {}).items()}
        while True:
            try:
                self._start(flags, named)
                break
            except _RefusedFlag as refused:
                flags = _without(flags, str(refused))
                run.note_left_out(str(refused))

    def _start(self, flags: list[str], environment: dict[str, str]) -> None:
        command = [sys.executable, "-m", "pagespec.cli", "serve", *flags]
        with self.log.open("wb") as log:
            self.proc = subprocess.Popen(
                command, env=os.environ | environment, stdout=log, stderr=subprocess.STDOUT
            )
        try:
            self._wait(_START_S)
        except BaseException:
            self.__exit__()
            raise

    def _wait(self, limit_s: float) -> None:
        import httpx

        until = time.monotonic() + limit_s
        transport = httpx.HTTPTransport(uds=self.uds) if self.uds else None
        with httpx.Client(transport=transport) as client:
            while time.monotonic() < until:
                if self.proc.poll() is not None:
                    raise self._why_it_ended()
                try:
                    if client.get(self.url_for("health")).status_code == 200:
                        return
                except httpx.TransportError:
                    pass
                time.sleep(0.1)
        raise RuntimeError(f"pagespec serve did not start in {limit_s} s")

    def _why_it_ended(self) -> Exception:
        last = self.log.read_text(errors="replace").strip().splitlines()[-5:]
        text = " ".join(" ".join(last).split())
        for pattern in _REFUSED:
            flag = re.search(pattern, text)
            if flag:
                return _RefusedFlag(_FLAGS.get(flag[1], flag[1]))
        return RuntimeError("pagespec serve ended: " + text)

    def __enter__(self) -> RemoteOpenAIServer:
        return self

    def __exit__(self, *_: object) -> None:
        if self.proc.poll() is None:
            self.proc.terminate()
            try:
                self.proc.wait(10)
            except subprocess.TimeoutExpired:
                self.proc.kill()
                self.proc.wait()

    @property
    def url_root(self) -> str:
        if self.uds:
            return f"http://{self.uds.rpartition('/')[2]}"
        return f"http://{self.host}:{self.port}"

    def url_for(self, *parts: str) -> str:
        return "/".join([self.url_root, *(part.strip("/") for part in parts if part)])

    def _settings(self, given: dict[str, Any]) -> dict[str, Any]:
        own = {"base_url": self.url_for("v1"), "api_key": self.DUMMY_API_KEY, "max_retries": 0}
        return {"timeout": 100} | own | given

    def get_client(self, **settings: Any) -> Any:
        import openai

        return openai.OpenAI(**self._settings(settings))

    def get_async_client(self, **settings: Any) -> Any:
        import openai

        return openai.AsyncOpenAI(**self._settings(settings))


def _replaced(flags: list[str]) -> list[str]:
    """Flags with models and types replaced as in ``models.engine_arguments``."""
    found = list(flags)
    for i, flag in enumerate(found[:-1]):
        if flag == "--dtype":
            found[i + 1] = "float32"
        elif flag == "--max-model-len":
            found[i + 1] = str(min(int(found[i + 1]), models.MAX_MODEL_LEN))
        elif flag == "--tokenizer":
            found[i + 1] = models.model_of(found[i + 1])
    return found
