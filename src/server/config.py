"""The settings of a server, declared and validated."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass, fields
from functools import partial
from typing import Any

from ..errors import InvalidInputError
from ..params.checks import flag, integer, is_list, number
from ..params.declare import check_fields, describe, param

# Enough for a million token ids as JSON. A body is held in memory.
_MAX_BODY_BYTES = 16 << 20
_MAX_HELD_BYTES = 128 << 20
_COUNT = integer(1, math.inf, "of 1 or more")
_TIMEOUT = number(0.0, math.inf, "above 0", is_above=True)
# Panels of the help: server (addresses), safety (keys and limits).
_server = partial(param, stage="Server")
_safety = partial(param, stage="Safety")


def _text(name: str, value: Any) -> str:
    if not isinstance(value, str) or not value:
        raise InvalidInputError(name, value, "must be text, not empty")
    return value


def _texts(name: str, value: Any) -> tuple[str, ...]:
    if not is_list(value) or not all(isinstance(one, str) and one for one in value):
        shown = "(not shown)" if name == "api_keys" else value
        raise InvalidInputError(name, shown, "must be a list of non-empty texts")
    return tuple(value)


def _keys(name: str, value: Any) -> tuple[str, ...]:
    # An HTTP header can carry no other characters, and comparing other text fails.
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
    """Settings of a server: the options of ``pagespec serve``.

    Raises:
        InvalidInputError: a setting is outside its limits.
    """

    model: str = param("model", "The model's name without --served-model-name.", _text, flag=None)
    host: str = _server("127.0.0.1", "Address to listen on; 0.0.0.0: all interfaces.", _text)
    port: int = _server(
        8000, "0: a free port, which is logged.", integer(0, (1 << 16) - 1, "from 0 to 65535")
    )
    uds: str | None = _server(None, "A Unix socket to listen on instead.", _text, metavar="PATH")
    root_path: str = _server(
        "", "Path prefix under which a proxy serves this server.", _root_path, metavar="PATH"
    )
    ssl_keyfile: str | None = _server(None, "Serve HTTPS with this key.", _text, metavar="FILE")
    ssl_certfile: str | None = _server(None, "The certificate of that key.", _text, metavar="FILE")
    served_model_names: tuple[str, ...] = _server(
        (),
        "Name of the model in requests; may be repeated. Answers contain the first one.",
        _texts,
        absent="--model",
        metavar="NAME",
        flag="--served-model-name",
    )
    enable_force_include_usage: bool = _server(
        False,
        "Send the usage in each chunk of every stream and in a last chunk of its own.",
        flag(),
    )
    return_tokens_as_token_ids: bool = _server(
        False,
        'Write tokens as "token_id:NN" in log-probabilities, unless a request says otherwise.',
        flag(),
    )
    access_log: bool = _server(True, "Log a line for each request.", flag())
    log_json: bool = _server(False, "Log JSON, one object per line.", flag())
    api_keys: tuple[str, ...] = _safety(
        (),
        "Accepted API key; may be repeated. The environment variable PAGESPEC_API_KEY may contain "
        "more, separated by commas: other users of this machine can read command lines.",
        _keys,
        metavar="KEY",
        flag="--api-key",
    )
    salt_per_key: bool = _safety(False, "Do not share the prefix cache across API keys.", flag())
    enable_admin: bool = _safety(
        False, "Serve /pause, /resume, /is_paused and /reset_prefix_cache.", flag()
    )
    cors_origins: tuple[str, ...] = _safety(
        (),
        "Origin of web pages that may use this server (CORS); may be repeated. *: any origin.",
        _texts,
        metavar="ORIGIN",
        flag="--cors-origin",
    )
    max_num_requests: int = _safety(
        1024, "Maximum number of waiting and running requests (429 above).", _COUNT
    )
    max_body_bytes: int = _safety(_MAX_BODY_BYTES, "Maximum size of a request body (413).", _COUNT)
    body_timeout_s: float = _safety(60.0, "Time limit for receiving a body (408).", _TIMEOUT)
    write_timeout_s: float | None = _safety(
        60.0,
        "Close a connection whose client reads no byte for this long.",
        _TIMEOUT,
        takes_none=True,
    )
    request_timeout_s: float | None = _safety(
        None, "Time limit for a request (503).", _TIMEOUT, absent="no limit"
    )
    drain_timeout_s: float = _safety(
        60.0,
        "Maximum wait for running requests after SIGTERM.",
        number(0.0, math.inf, "of 0 or more"),
    )

    def __post_init__(self) -> None:
        check_fields(self)
        if (self.ssl_keyfile is None) != (self.ssl_certfile is None):
            limit = "must be given together with ssl_keyfile"
            raise InvalidInputError("ssl_certfile", self.ssl_certfile, limit)
        if self.salt_per_key and not self.api_keys:
            raise InvalidInputError("salt_per_key", True, "needs an API key")

    @property
    def max_held_bytes(self) -> int:
        """Maximum number of bytes of all bodies held at the same time."""
        return max(_MAX_HELD_BYTES, 4 * self.max_body_bytes)

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the model in requests."""
        return self.served_model_names or (self.model,)

    @property
    def root(self) -> str:
        """The model's hub id, or the last part of its path."""
        name = self.model.replace("\\", "/").rstrip("/")
        is_path = name[:1] in ("/", ".", "~") or name.count("/") > 1 or os.path.exists(self.model)
        return name.rpartition("/")[2] if is_path else name

    def shown(self) -> dict[str, Any]:
        """All settings except the keys, for logs."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return values | {"api_keys": len(self.api_keys)}


ServerConfig.__doc__ = f"{ServerConfig.__doc__}\n    Attributes:\n{describe(ServerConfig, 8)}"
