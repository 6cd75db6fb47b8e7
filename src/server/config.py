"""The settings of a server, declared and checked."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass, fields
from functools import partial
from typing import Any

from ..errors import InvalidInputError
from ..params.checks import flag, integer, is_list, number
from ..params.declare import check_fields, describe, param

# A million token ids, written out, and then some. A body is held in memory.
_MAX_BODY_BYTES = 16 << 20
_MAX_HELD_BYTES = 128 << 20
_COUNT = integer(1, math.inf, "of 1 or more")
_TIMEOUT = number(0.0, math.inf, "above 0", is_above=True)
# Panels of the help: addresses; keys and limits.
_server = partial(param, stage="Server")
_safety = partial(param, stage="Safety")


def _text(name: str, value: Any) -> str:
    if not isinstance(value, str) or not value:
        raise InvalidInputError(name, value, "must be text, not empty")
    return value


def _texts(name: str, value: Any) -> tuple[str, ...]:
    if not is_list(value) or not all(isinstance(one, str) and one for one in value):
        shown = "(not shown)" if name == "api_keys" else value
        raise InvalidInputError(name, shown, "must be a list of texts, none empty")
    return tuple(value)


def _keys(name: str, value: Any) -> tuple[str, ...]:
    # A header can carry no other, and a comparison of other text fails.
    keys = _texts(name, value)
    if not all(key.isascii() and key.isprintable() for key in keys):
        raise InvalidInputError(name, "(not shown)", "must be printable ASCII")
    return keys


def _root_path(name: str, value: Any) -> str:
    if not isinstance(value, str) or value[:1] not in ("", "/"):
        raise InvalidInputError(name, value, 'must be empty, or begin with "/"')
    return value


@dataclass(frozen=True, kw_only=True)
class ServerConfig:
    """Settings of a server, which are the options of ``pagespec serve``.

    Raises:
        InvalidInputError: a setting is outside its limits.
    """

    model: str = param("model", "The model's name without --served-model-name.", _text, flag=None)
    host: str = _server("127.0.0.1", "Address to listen on; 0.0.0.0 is every network.", _text)
    port: int = _server(
        8000, "0 takes a free one, which is logged.", integer(0, (1 << 16) - 1, "from 0 to 65535")
    )
    uds: str | None = _server(None, "A Unix socket to listen on instead.", _text, metavar="PATH")
    root_path: str = _server(
        "", "Path under which a proxy shows this server.", _root_path, metavar="PATH"
    )
    ssl_keyfile: str | None = _server(None, "Serve HTTPS with this key.", _text, metavar="FILE")
    ssl_certfile: str | None = _server(None, "The certificate of that key.", _text, metavar="FILE")
    served_model_names: tuple[str, ...] = _server(
        (),
        "Name of the model in requests; may be repeated, answers have the first.",
        _texts,
        absent="--model",
        metavar="NAME",
        flag="--served-model-name",
    )
    access_log: bool = _server(True, "Log a line for each request.", flag())
    log_json: bool = _server(False, "Log JSON, one object per line.", flag())
    api_keys: tuple[str, ...] = _safety(
        (),
        "Accepted API key; may be repeated. The environment variable PAGESPEC_API_KEY can hold "
        "more, separated by commas: other users of this machine can read command lines.",
        _keys,
        metavar="KEY",
        flag="--api-key",
    )
    salt_per_key: bool = _safety(False, "Different keys do not share the prefix cache.", flag())
    enable_admin: bool = _safety(
        False, "Serve /pause, /resume, /is_paused and /reset_prefix_cache.", flag()
    )
    cors_origins: tuple[str, ...] = _safety(
        (),
        "Origin of web pages that may use this server (CORS); may be repeated, * is all.",
        _texts,
        metavar="ORIGIN",
        flag="--cors-origin",
    )
    max_num_requests: int = _safety(
        1024, "Most requests that wait or run; more are refused (429).", _COUNT
    )
    max_body_bytes: int = _safety(_MAX_BODY_BYTES, "Most bytes of a request's body (413).", _COUNT)
    body_timeout_s: float = _safety(60.0, "Longest that a body may take to arrive (408).", _TIMEOUT)
    write_timeout_s: float | None = _safety(
        60.0,
        "Longest time without a byte taken by the client; then its connection is closed.",
        _TIMEOUT,
        takes_none=True,
    )
    request_timeout_s: float | None = _safety(
        None, "Longest that a request may take (503).", _TIMEOUT, absent="any time"
    )
    drain_timeout_s: float = _safety(
        60.0,
        "Longest wait for running requests after SIGTERM.",
        number(0.0, math.inf, "of 0 or more"),
    )

    def __post_init__(self) -> None:
        check_fields(self)
        if (self.ssl_keyfile is None) != (self.ssl_certfile is None):
            limit = "is given together with ssl_keyfile"
            raise InvalidInputError("ssl_certfile", self.ssl_certfile, limit)
        if self.salt_per_key and not self.api_keys:
            raise InvalidInputError("salt_per_key", True, "needs an API key")

    @property
    def max_held_bytes(self) -> int:
        """Most bytes of all bodies that are held at once."""
        return max(_MAX_HELD_BYTES, 4 * self.max_body_bytes)

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the model in requests."""
        return self.served_model_names or (self.model,)

    @property
    def root(self) -> str:
        """The model's name on the hub, or the last part of its path."""
        name = self.model.replace("\\", "/").rstrip("/")
        is_path = name[:1] in ("/", ".", "~") or name.count("/") > 1 or os.path.exists(self.model)
        return name.rpartition("/")[2] if is_path else name

    def shown(self) -> dict[str, Any]:
        """All settings without keys, for logs."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return values | {"api_keys": len(self.api_keys)}


ServerConfig.__doc__ = f"{ServerConfig.__doc__}\n    Attributes:\n{describe(ServerConfig, 8)}"
