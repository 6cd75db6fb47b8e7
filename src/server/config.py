"""How a server is set up: every setting, checked."""

from __future__ import annotations

import os
from dataclasses import dataclass, fields
from typing import Any

from ..errors import InvalidInputError
from ..validation import is_int, is_list, is_number

# A million token ids, written out, and then some. A body is held in memory.
_MAX_BODY_BYTES = 16 << 20
_MAX_HELD_BYTES = 128 << 20


@dataclass(frozen=True, kw_only=True)
class ServerConfig:
    """Settings of a server.

    Attributes:
        model: name of the model where no name to serve it under is given.
        served_model_names: names that requests may call it by; the first is used in answers.
        host, port: where to listen; port 0 takes a free one.
        uds: path of a Unix socket to listen on instead.
        root_path: path under which a proxy shows this server.
        ssl_keyfile, ssl_certfile: serve HTTPS; both or none.
        api_keys: keys of which a request must bring one; none: no key is asked for.
        salt_per_key: requests with different keys do not share the prefix cache.
        enable_admin: serve ``/pause``, ``/resume``, ``/is_paused`` and ``/reset_prefix_cache``.
        cors_origins: web pages' origins that browsers may let use this server; "*" all.
        max_num_requests: most requests that wait or run, each of ``n`` continuations one.
        max_body_bytes: most bytes of a request's body.
        body_timeout_s: longest that a request's body may take to arrive.
        write_timeout_s: longest that a client may take no byte of its answer, after which its
            connection is closed; None: any time.
        request_timeout_s: longest that a request may take; None: any time.
        drain_timeout_s: after SIGTERM, longest that running requests are waited for.
        access_log: log a line for each request.
        log_json: log JSON, one object a line.

    Raises:
        InvalidInputError: a setting is outside its limits.
    """

    model: str = "model"
    served_model_names: tuple[str, ...] = ()
    host: str = "127.0.0.1"
    port: int = 8000
    uds: str | None = None
    root_path: str = ""
    ssl_keyfile: str | None = None
    ssl_certfile: str | None = None
    api_keys: tuple[str, ...] = ()
    salt_per_key: bool = False
    enable_admin: bool = False
    cors_origins: tuple[str, ...] = ()
    max_num_requests: int = 1024
    max_body_bytes: int = _MAX_BODY_BYTES
    body_timeout_s: float = 60.0
    write_timeout_s: float | None = 60.0
    request_timeout_s: float | None = None
    drain_timeout_s: float = 60.0
    access_log: bool = True
    log_json: bool = False

    def __post_init__(self) -> None:
        for name in ("served_model_names", "api_keys", "cors_origins"):
            _check_texts(name, getattr(self, name))
            object.__setattr__(self, name, tuple(getattr(self, name)))
        for name in ("model", "host"):
            _require(self, name, _is_text(getattr(self, name)), "must be text, not empty")
        for name in ("uds", "ssl_keyfile", "ssl_certfile"):
            value = getattr(self, name)
            _require(self, name, value is None or _is_text(value), "must be a path, or None")
        for name in ("salt_per_key", "enable_admin", "access_log", "log_json"):
            _require(self, name, isinstance(getattr(self, name), bool), "must be True or False")
        _require(self, "port", is_int(self.port) and 0 <= self.port < 1 << 16, "0 to 65535")
        has_root = isinstance(self.root_path, str) and self.root_path[:1] in ("", "/")
        _require(self, "root_path", has_root, 'must be empty, or begin with "/"')
        has_both = (self.ssl_keyfile is None) == (self.ssl_certfile is None)
        _require(self, "ssl_certfile", has_both, "is given together with ssl_keyfile")
        _require(self, "salt_per_key", not self.salt_per_key or self.api_keys, "needs an API key")
        # A header can carry no other, and a comparison of other text fails.
        is_plain = all(key.isascii() and key.isprintable() for key in self.api_keys)
        if not is_plain:
            raise InvalidInputError("api_keys", "(not shown)", "must be printable ASCII")
        for name in ("max_num_requests", "max_body_bytes"):
            value = getattr(self, name)
            _require(self, name, is_int(value) and value >= 1, "must be an integer of 1 or more")
        for name in ("body_timeout_s", "write_timeout_s", "request_timeout_s"):
            value = getattr(self, name)
            is_none = value is None and name != "body_timeout_s"
            _require(self, name, is_none or (is_number(value) and value > 0), "must be above 0")
        is_time = is_number(self.drain_timeout_s) and self.drain_timeout_s >= 0
        _require(self, "drain_timeout_s", is_time, "must be 0 or more")

    @property
    def max_held_bytes(self) -> int:
        """Most bytes of all bodies that are held at once."""
        return max(_MAX_HELD_BYTES, 4 * self.max_body_bytes)

    @property
    def names(self) -> tuple[str, ...]:
        """What requests may call the model."""
        return self.served_model_names or (self.model,)

    @property
    def root(self) -> str:
        """What the model is, for clients: its name on the hub, or the last part of its path."""
        name = self.model.replace("\\", "/").rstrip("/")
        is_path = name[:1] in ("/", ".", "~") or name.count("/") > 1 or os.path.exists(self.model)
        return name.rpartition("/")[2] if is_path else name

    def shown(self) -> dict[str, Any]:
        """All settings, keys left out: for logs."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return values | {"api_keys": len(self.api_keys)}


def _is_text(value: object) -> bool:
    return isinstance(value, str) and bool(value)


def _check_texts(name: str, values: object) -> None:
    if not is_list(values) or not all(_is_text(value) for value in values):  # type: ignore[attr-defined]
        shown = "(not shown)" if name == "api_keys" else values
        raise InvalidInputError(name, shown, "must be a list of texts, none empty")


def _require(config: ServerConfig, name: str, is_met: object, limit: str) -> None:
    if not is_met:
        raise InvalidInputError(name, getattr(config, name), limit)
