"""Hand-written HTTP, for requests that a client library would not send."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import contextmanager
from urllib.parse import urlsplit


@contextmanager
def connected(url: str, timeout_s: float = 20.0) -> Iterator[socket.socket]:
    parts = urlsplit(url)
    with socket.create_connection((parts.hostname, parts.port), timeout=timeout_s) as connection:
        yield connection


def read_answer(connection: socket.socket) -> tuple[int, dict[str, str], bytes]:
    """Status, headers and body of an answer with a length."""
    file = connection.makefile("rb")
    status = int(file.readline().split()[1])
    headers = {}
    while (line := file.readline().strip()) != b"":
        name, _, value = line.decode().partition(":")
        headers[name.lower()] = value.strip()
    return status, headers, file.read(int(headers.get("content-length", 0)))


def head(path: str, *headers: str, method: str = "POST") -> bytes:
    return "\r\n".join([f"{method} {path} HTTP/1.1", "Host: test", *headers, "", ""]).encode()
