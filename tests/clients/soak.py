"""A soak test over HTTP, for minutes or hours: nothing leaks, and every request gets an answer.

    python -m tests.clients.soak --minutes 60                   # an engine without a model
    python -m tests.clients.soak --minutes 60 --model PATH      # `pagespec serve --model PATH`
    python -m tests.clients.soak --minutes 5 --url http://127.0.0.1:8000 --pid 4711

Requests of all kinds arrive; a third of them is abandoned midway. The server runs in its own
process. Its memory is read twice while idle: after a warm-up that fills the caches, and at the end.
Prints one line per minute and a summary as JSON. Exits with 1 if memory grew by more than --limit
percent, if a block is still owned at the end, or if a request got no answer.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import re
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import httpx

MIB = 1 << 20
_START_S = 600.0
_WARM_UP_SHARE = 0.1


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--clients", type=int, default=32)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--limit", type=float, default=2.0, help="growth of memory in percent")
    parser.add_argument("--max-tokens", type=int, default=40)
    parser.add_argument("--model", help="serve this instead of the engine without a model")
    parser.add_argument("--url", help="a server that runs already; then --pid too")
    parser.add_argument("--pid", type=int)
    return parser.parse_args()


# The server -------------------------------------------------------------------------------------


def serve_content() -> None:
    """An engine that has everything but a model, on a free port. In a process of its own."""
    from pagespec import AsyncLLM
    from pagespec.server.config import ServerConfig
    from pagespec.server.run import listen, serve
    from tests.support.content_llm import slow_llm

    config = ServerConfig(port=0, access_log=False, max_num_requests=24)
    with listen(config) as listener:
        print(f"http://127.0.0.1:{listener.getsockname()[1]}", flush=True)
        engine = AsyncLLM(slow_llm(0.002, num_blocks=256, max_num_seqs=16), max_num_requests=24)
        sys.exit(serve(engine, config, listener))


def started(model: str | None) -> tuple[subprocess.Popen[str], str]:
    if model is None:
        code = "from tests.clients.soak import serve_content; serve_content()"
        process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
        assert process.stdout is not None
        return process, process.stdout.readline().strip()
    port = 18_000 + os.getpid() % 10_000
    command = [sys.executable, "-m", "pagespec.cli", "serve", "--port", str(port)]
    quiet = ["--no-access-log", "--max-num-requests", "64"]
    return subprocess.Popen([*command, "--model", model, *quiet], text=True), (
        f"http://127.0.0.1:{port}"
    )


def resident_bytes(pid: int) -> int:
    """Of a process and its children: ranks of a model are processes too."""
    total = 0
    for status in Path("/proc").glob("[0-9]*/status"):
        try:
            text = status.read_text()
        except OSError:  # it has ended
            continue
        number, parent = (re.findall(rf"^{key}:\s+(\d+)", text, re.M) for key in ("Pid", "PPid"))
        if str(pid) in (*number, *parent):
            total += sum(int(kib) << 10 for kib in re.findall(r"^VmRSS:\s+(\d+)", text, re.M))
    return total


# The clients ------------------------------------------------------------------------------------


class Client:
    """Sends one request after the other."""

    def __init__(self, url: str, has_chat: bool, seed: int, max_tokens: int) -> None:
        self._http = httpx.AsyncClient(base_url=url, timeout=120.0)
        self._random = random.Random(seed)
        self._has_chat, self._max_tokens = has_chat, max_tokens
        self.outcomes: Counter[str] = Counter()
        self.num_tokens = 0

    async def run(self, until: float) -> None:
        async with self._http:
            while time.monotonic() < until:
                try:
                    self.outcomes[await self._one()] += 1
                except httpx.HTTPError as error:
                    self.outcomes[f"no answer: {type(error).__name__}"] += 1

    async def _one(self) -> str:
        choose = self._random
        kind = choose.random()
        if kind < 0.03:
            return await self._status(
                "GET", choose.choice(("/metrics", "/v1/models", "/live", "/"))
            )
        if kind < 0.06:
            headers = {"Content-Type": "application/json"}
            return await self._status("POST", "/v1/completions", content=b"{no", headers=headers)
        if kind < 0.08:
            return await self._status("POST", "/v1/completions", json={"prompt": "a", "nothing": 1})
        path, body = self._body()
        if kind < 0.4:
            return await self._status("POST", path, json=body)
        return await self._stream(path, {**body, "stream": True})

    def _body(self) -> tuple[str, dict[str, object]]:
        choose = self._random
        body: dict[str, object] = {
            "max_tokens": choose.randint(1, self._max_tokens),
            "temperature": choose.choice((0, 0.7, 1.0)),
            "seed": choose.randrange(1 << 30),
        }
        if choose.random() < 0.2 and body["temperature"]:
            body["n"] = 2
        # Some begin as others do, so that there are hits; all together are more than fit.
        words = [choose.choice("abc") for _ in range(choose.randint(1, 60))]
        text = "abcabcabc" * choose.randrange(3) + "".join(words)
        if self._has_chat and choose.random() < 0.5:
            return "/v1/chat/completions", body | {
                "messages": [{"role": "user", "content": f"Say something of {text}."}],
                "logprobs": choose.random() < 0.2,
            }
        if choose.random() < 0.2:
            body["logprobs"] = 2 if self._has_chat else None
        return "/v1/completions", body | {"prompt": text}

    async def _status(self, method: str, path: str, **sent: object) -> str:
        answer = await self._http.request(method, path, **sent)  # type: ignore[arg-type]
        if answer.status_code == 429:
            await asyncio.sleep(0.2)
        if answer.status_code == 200 and path.startswith("/v1/") and method == "POST":
            self.num_tokens += answer.json()["usage"]["completion_tokens"]
        return str(answer.status_code)

    async def _stream(self, path: str, body: dict[str, object]) -> str:
        """Read to its end, slowly, or left after some events."""
        leaves_after = self._random.randint(0, 12) if self._random.random() < 0.5 else None
        is_slow = self._random.random() < 0.05
        async with self._http.stream("POST", path, json=body) as answer:
            if answer.status_code != 200:
                await answer.aread()
                await asyncio.sleep(0.2)
                return str(answer.status_code)
            num_events, last, error = 0, "", ""
            async for line in answer.aiter_lines():
                if line.startswith("data: "):
                    num_events, last = num_events + 1, line
                    self.num_tokens += line != "data: [DONE]"
                    error = error or (line if line.startswith('data: {"error"') else "")
                if leaves_after is not None and num_events >= leaves_after:
                    return "left"
                if is_slow:
                    await asyncio.sleep(0.05)
        if error:
            return f"no answer: {error[:200]}"
        return "streamed" if last == "data: [DONE]" else f"no answer: ended by {last[:60]!r}"


# The measurement --------------------------------------------------------------------------------


async def settled(http: httpx.AsyncClient) -> dict[str, int]:
    """Blocks and requests, when nothing runs any more."""
    for _ in range(300):
        frame = (await http.get("/live")).json()
        if not any(frame["requests"][name] for name in ("running", "waiting", "paused")):
            await asyncio.sleep(0.5)
            return {"owned_blocks": (await http.get("/live")).json()["blocks"]["owned"]}
        await asyncio.sleep(0.1)
    return {"owned_blocks": -1, **frame["requests"]}


async def soak(url: str, pid: int, chosen: argparse.Namespace) -> int:
    async with httpx.AsyncClient(base_url=url, timeout=30.0) as http:
        begin = time.monotonic()
        while True:
            try:
                if (await http.get("/health")).status_code == 200:
                    break
            except httpx.HTTPError:
                pass
            if time.monotonic() - begin > _START_S:
                sys.exit("the server does not become ready")
            await asyncio.sleep(0.5)
        has_chat = (await http.get("/live")).json()["model"]["has_chat_template"]
        clients: list[Client] = []

        async def load(seconds: float) -> None:
            until = time.monotonic() + seconds
            new = [
                Client(url, has_chat, chosen.seed + len(clients) + k, chosen.max_tokens)
                for k in range(chosen.clients)
            ]
            clients.extend(new)
            tasks = [asyncio.create_task(client.run(until)) for client in new]
            while time.monotonic() < until:
                await asyncio.sleep(min(60.0, max(0.0, until - time.monotonic())))
                num = sum(sum(client.outcomes.values()) for client in clients)
                print(
                    f"{(time.monotonic() - begin) / 60:6.1f} min  "
                    f"{resident_bytes(pid) / MIB:9.1f} MiB  {num} requests",
                    flush=True,
                )
            await asyncio.gather(*tasks)

        seconds = 60.0 * chosen.minutes
        await load(_WARM_UP_SHARE * seconds)
        await settled(http)
        first = resident_bytes(pid)
        await load((1 - _WARM_UP_SHARE) * seconds)
        end = await settled(http)
        last = resident_bytes(pid)
    outcomes = sum((client.outcomes for client in clients), Counter())
    growth = 100.0 * (last - first) / first
    lost = sum(number for name, number in outcomes.items() if name.startswith(("no", "5")))
    summary = {
        "minutes": chosen.minutes,
        "clients": chosen.clients,
        "requests": sum(outcomes.values()),
        "tokens": sum(client.num_tokens for client in clients),
        "outcomes": dict(sorted(outcomes.items())),
        "rss_mib_after_warm_up": round(first / MIB, 1),
        "rss_mib_at_end": round(last / MIB, 1),
        "growth_percent": round(growth, 2),
        **end,
    }
    print(json.dumps(summary, indent=2))
    return int(growth > chosen.limit or end["owned_blocks"] != 0 or lost > 0)


def main() -> int:
    chosen = options()
    if chosen.url is not None:
        return asyncio.run(soak(chosen.url, chosen.pid, chosen))
    process, url = started(chosen.model)
    try:
        return asyncio.run(soak(url, process.pid, chosen))
    finally:
        process.terminate()
        process.wait(90)


if __name__ == "__main__":
    sys.exit(main())
