"""The effect of bad clients on steady clients of a server: time to first token, and memory.

``pagespec serve`` serves a tiny random model in a separate process. Steady clients stream short
chats in this process. Each kind of crowd (``bad_clients``) is a third process:

* leavers: of 200 clients 66 disconnect during an answer, or before it; "alone": all 200 stay;
* texts: 8 MB of text per second from each of six clients, which disconnect;
* schemas: twelve clients with schemas that are always new and take long to compile;
* readers: 50 clients that never read their answers of 1,500 tokens;
* reading: the same 50 answers, read as they come: the cost of that many rows alone;
* bodies: 11 MB of JSON, and bodies for paths that take none.

Slices of two seconds (leavers: six) without and with a crowd alternate, for all kinds in turn, so
that other load of the machine affects both. Between slices the server becomes idle. The script
prints, without and with each crowd: the median time to first token, also in processor time of the
server, which other load does not change; the ratios, and the lowest and the highest ratio of a pair
of slices; the longest response time of ``/health`` (the event loop's longest gap); processors used
per process; and the server's peak memory (RSS).

    python -m benchmarks.crowd --seconds 10
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import re
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from dataclasses import dataclass, field
from pathlib import Path

from tests.support.chat_models import save_chat_model

from .bad_clients import KINDS, NUM_LEAVERS, chat, send

_ROOT = Path(__file__).resolve().parents[1]
_NUM_STEADY, _NUM_MANY = 8, 200
_SLICE_S, _LONG_SLICE_S = 2.0, 6.0
_BEFORE_S = 0.5  # after a crowd starts
_REST_S, _MAX_REST_S, _IS_AT_REST = 0.3, 20.0, 0.15  # the last in processors
_PROBE_S = 0.01
_FIRST_TOKEN = re.compile(rb'"token_ids":\[\d')
_HEALTH = b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n"


class Server:
    """A server's process; ``port`` is where it listens."""

    def __init__(self, folder: Path, options: list[str]) -> None:
        model = save_chat_model(folder / "model")
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.port = free.getsockname()[1]
        command = [sys.executable, "-m", "pagespec.cli", "serve", "--model", model, "--compile"]
        command += ["eager", "--port", str(self.port), "--no-access-log", "--num-blocks", "2000"]
        self._log = folder / "log"
        with self._log.open("w") as log:
            self.process = subprocess.Popen(
                [*command, *options],
                cwd=_ROOT,
                stderr=log,
                env={**os.environ, "PYTHONUNBUFFERED": "1"},
            )

    def wait(self, limit_s: float = 120.0) -> None:
        until = time.monotonic() + limit_s
        while True:
            with contextlib.suppress(OSError):
                urllib.request.urlopen(f"http://127.0.0.1:{self.port}/health", timeout=5)
                return
            if self.process.poll() is not None or time.monotonic() > until:
                raise RuntimeError(self._log.read_text()[-3000:])
            time.sleep(0.1)

    def rss_mib(self) -> float:
        pages = int(Path(f"/proc/{self.process.pid}/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE") / (1 << 20)

    async def rest(self) -> None:
        """Wait until the server computes nothing for a crowd that has left."""
        until = time.monotonic() + _MAX_REST_S
        while time.monotonic() < until:
            before = cpu_s(self.process.pid)
            await asyncio.sleep(_REST_S)
            if cpu_s(self.process.pid) - before < _IS_AT_REST * _REST_S:
                return


class Crowd:
    """The process of bad clients of one kind."""

    def __init__(self, kind: str, port: int) -> None:
        command = [sys.executable, "-m", "benchmarks.bad_clients", kind, str(port)]
        self.process = subprocess.Popen(
            command, cwd=_ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self._wait()

    def tell(self, what: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(f"{what}\n")
        self.process.stdin.flush()
        self._wait()

    def _wait(self) -> None:
        assert self.process.stdout is not None
        if self.process.stdout.readline().strip() != "done":
            raise RuntimeError("the bad clients have ended")


def cpu_s(pid: int) -> float:
    """Seconds of processor time that a process has used: Linux's clock of another process."""
    return time.clock_gettime((~pid << 3) | 2)


@dataclass
class Slices:
    """Measurements alone, or with a crowd.

    Attributes:
        first_token: per slice, for each answer: seconds, and the server's processor time that
            passed meanwhile, which excludes other load of the machine.
        health_s: seconds of each ``/health``.
        own_gap_s: longest delay of this process's own event loop.
        cpus: processors used by the server, the crowd and this process, per slice.
        rss_mib: the server's peak memory.
    """

    first_token: list[list[tuple[float, float]]] = field(default_factory=list)
    health_s: list[float] = field(default_factory=list)
    own_gap_s: float = 0.0
    cpus: list[tuple[float, ...]] = field(default_factory=list)
    rss_mib: float = 0.0

    def column(self, which: int) -> list[float]:
        return sorted(found[which] for one in self.first_token for found in one)

    def medians(self, which: int) -> list[float]:
        return [statistics.median(found[which] for found in one) for one in self.first_token]

    def median_cpus(self) -> list[float]:
        return [statistics.median(column) for column in zip(*self.cpus, strict=True)]


class Row:
    """One kind of crowd, with this many steady clients."""

    def __init__(self, server: Server, kind: str) -> None:
        self._server, self._kind = server, kind
        is_many = kind == "leavers"
        self._num_alone = _NUM_MANY if is_many else _NUM_STEADY
        self._num_beside = self._num_alone - (NUM_LEAVERS if is_many else 0)
        self._num_tokens = 32 if is_many else 8
        self._slice_s = _LONG_SLICE_S if is_many else _SLICE_S
        self._crowd = Crowd(kind, server.port)
        self._alone, self._beside = Slices(), Slices()

    def close(self) -> None:
        self._crowd.process.kill()
        self._crowd.process.wait()

    async def measure(self) -> None:
        """Measure a slice alone, and one with the crowd."""
        await self._server.rest()
        await self._slice(self._alone, self._num_alone)
        self._crowd.tell("go")
        await asyncio.sleep(_BEFORE_S)
        await self._slice(self._beside, self._num_beside)
        self._crowd.tell("stop")

    async def warm_up(self) -> None:
        await self._slice(Slices(), self._num_alone)

    async def _slice(self, slices: Slices, num_steady: int) -> None:
        pids = self._server.process.pid, self._crowd.process.pid, os.getpid()
        began, before = time.monotonic(), [cpu_s(pid) for pid in pids]
        until = began + self._slice_s
        found: list[tuple[float, float]] = []
        steady = [self._steady(until, found) for _ in range(num_steady)]
        await asyncio.gather(self._probe(until, slices), *steady)
        took = time.monotonic() - began
        cpus = [(cpu_s(pid) - b) / took for pid, b in zip(pids, before, strict=True)]
        slices.cpus.append(tuple(cpus))
        slices.first_token.append(found)

    async def _steady(self, until: float, found: list[tuple[float, float]]) -> None:
        pid = self._server.process.pid
        while time.monotonic() < until:
            data = chat(self._num_tokens)
            began, cpu_began = time.monotonic(), cpu_s(pid)
            reader, writer = await send(self._server.port, data)
            received = b""
            while _FIRST_TOKEN.search(received) is None:
                part = await reader.read(1 << 16)
                if not part:
                    raise RuntimeError(f"no first token: {received[-500:]!r}")
                received += part
            found.append((time.monotonic() - began, cpu_s(pid) - cpu_began))
            while await reader.read(1 << 16):
                pass
            writer.close()
            await asyncio.sleep(0.05)

    async def _probe(self, until: float, slices: Slices) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", self._server.port)
        while time.monotonic() < until:
            began = time.monotonic()
            writer.write(_HEALTH)
            await reader.readuntil(b"\r\n\r\n")
            done = time.monotonic()
            slices.health_s.append(done - began)
            slices.rss_mib = max(slices.rss_mib, self._server.rss_mib())
            await asyncio.sleep(_PROBE_S)
            slices.own_gap_s = max(slices.own_gap_s, time.monotonic() - done - _PROBE_S)
        writer.close()

    def report(self) -> None:
        alone, beside = self._alone, self._beside
        said = []
        for which, name in enumerate(("", " of the server's processor time")):
            pairs = zip(alone.medians(which), beside.medians(which), strict=True)
            ratios = sorted(b / a for a, b in pairs)
            ratio = statistics.median(beside.column(which)) / statistics.median(alone.column(which))
            said.append(f"{ratio:.2f} times alone{name} ({ratios[0]:.2f} to {ratios[-1]:.2f})")
        print(f"{self._kind}, {self._num_beside} steady clients: {', '.join(said)}")
        for name, slices in (("alone", alone), ("beside", beside)):
            found, cpu, health = slices.column(0), slices.column(1), slices.health_s
            server, crowd, own = slices.median_cpus()
            print(f"  {name}: first token {1000 * statistics.median(found):.0f} ms, 90% below "
                  f"{1000 * found[int(0.9 * len(found))]:.0f} ms ({len(found)} answers; "
                  f"{1000 * statistics.median(cpu):.0f} ms of processor); /health "
                  f"{1000 * statistics.median(health):.1f} ms, at most {1000 * max(health):.0f} ms "
                  f"(own loop {1000 * slices.own_gap_s:.0f} ms late); processors: server "
                  f"{server:.2f}, crowd {crowd:.2f}, clients {own:.2f}; RSS {slices.rss_mib:.0f} "
                  "MiB", flush=True)  # fmt: skip


async def _measure(rows: list[Row], num_rounds: int) -> None:
    for row in rows:
        await row.warm_up()
    for _ in range(num_rounds):
        for row in rows:
            await row.measure()
        print(f"load average {os.getloadavg()[0]:.1f}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seconds", type=float, default=10.0, help="beside each crowd")
    parser.add_argument("--kinds", default=",".join(kind for kind in KINDS if kind != "nothing"))
    parser.add_argument("options", nargs="*", help="of pagespec serve, behind --")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        server = Server(Path(folder), arguments.options)
        rows: list[Row] = []
        try:
            server.wait()
            for kind in arguments.kinds.split(","):
                rows.append(Row(server, kind))
            asyncio.run(_measure(rows, max(2, round(arguments.seconds / _SLICE_S))))
            for row in rows:
                row.report()
        finally:
            for row in rows:
                row.close()
            server.process.kill()
            server.process.wait()


if __name__ == "__main__":
    main()
