"""``pagespec serve``: the OpenAI-compatible HTTP server."""

from __future__ import annotations

import os
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, ClassVar

import typer

from ..errors import PagespecError
from . import make_llm
from .command import option
from .options import EngineOptions

if TYPE_CHECKING:
    from ..server.config import ServerConfig

KEY_VARIABLE = "PAGESPEC_API_KEY"


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class ServerOptions:
    """Where to serve, and to whom; as of ``ServerConfig``."""

    PANEL: ClassVar = "Server"

    host: str = option("127.0.0.1", "NAME", "Where to listen; 0.0.0.0 is every network.")
    port: int = option(8000, "N", "0 takes a free one, which is logged.")
    uds: str | None = option(None, "PATH", "A Unix socket to listen on instead.")
    root_path: str = option("", "PATH", "Path under which a proxy shows this server.")
    ssl_keyfile: str | None = option(None, "FILE", "Serve HTTPS with this key.")
    ssl_certfile: str | None = option(None, "FILE", "The certificate of that key.")
    served_model_name: list[str] | None = option(  # noqa: RUF009
        None,
        "NAME",
        "What requests call the model; may be repeated, answers have the first.",
        show_default="--model",
    )
    access_log: bool = option(True, None, "Log a line for each request.")
    log_json: bool = option(False, None, "Log JSON, one object a line.", "--log-json")


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class SafetyOptions:
    """Who may use a server, and how much of it; as of ``ServerConfig``."""

    PANEL: ClassVar = "Safety"

    api_key: list[str] | None = option(  # noqa: RUF009
        None,
        "KEY",
        "A key of which requests must bring one; may be repeated. The environment variable "
        f"{KEY_VARIABLE} can hold some too, with commas between them: other users of this machine "
        "can read command lines.",
    )
    salt_per_key: bool = option(
        False, None, "Different keys do not share the prefix cache.", "--salt-per-key"
    )
    enable_admin: bool = option(
        False,
        None,
        "Serve /pause, /resume, /is_paused and /reset_prefix_cache.",
        "--enable-admin",
    )
    cors_origin: list[str] | None = option(  # noqa: RUF009
        None,
        "ORIGIN",
        "Web pages that browsers may let use this server; may be repeated, * is all.",
    )
    max_num_requests: int = option(
        1024, "N", "Most requests that wait or run; more are refused (429)."
    )
    max_body_bytes: int = option(16 << 20, "N", "Most bytes of a request's body (413).")
    body_timeout: float = option(60.0, "S", "Longest that a body may take to arrive (408).")
    write_timeout: float = option(
        60.0, "S", "Longest that a client may take no byte of its answer; then it is closed."
    )
    request_timeout: float | None = option(
        None, "S", "Longest that a request may take (503).", show_default="any time"
    )
    drain_timeout: float = option(
        60.0, "S", "After SIGTERM, longest that running requests are waited for."
    )


def server_config(
    engine: EngineOptions, server: ServerOptions, safety: SafetyOptions
) -> ServerConfig:
    """Raises:
    PagespecError: FastAPI is not installed, or an option is outside its limits.
    """
    try:
        import fastapi  # noqa: F401
        import uvicorn  # noqa: F401
    except ImportError as error:
        needed = "to serve needs more packages: pip install 'pagespec[server]'"
        raise PagespecError(needed) from error
    from ..server.config import ServerConfig

    values = {f.name: getattr(o, f.name) for o in (server, safety) for f in fields(o)}
    keys = [key.strip() for key in os.environ.get(KEY_VARIABLE, "").split(",")]
    return ServerConfig(
        model=make_llm.model_label(engine),
        served_model_names=values.pop("served_model_name") or (),
        api_keys=(*(values.pop("api_key") or ()), *filter(None, keys)),
        cors_origins=values.pop("cors_origin") or (),
        body_timeout_s=values.pop("body_timeout"),
        write_timeout_s=values.pop("write_timeout"),
        request_timeout_s=values.pop("request_timeout"),
        drain_timeout_s=values.pop("drain_timeout"),
        **values,
    )


def serve_model(engine: EngineOptions, server: ServerOptions, safety: SafetyOptions) -> None:
    """Load the model and serve it until a signal.

    Raises:
        PagespecError, OSError: an option or the model is refused, or the address cannot be had.
    """
    config = server_config(engine, server, safety)
    from ..aio.async_llm import AsyncLLM
    from ..server.logs import set_up_logs
    from ..server.run import listen, serve

    set_up_logs(config.log_json)
    with listen(config) as listener:
        llm = make_llm.start_llm(engine)
        code = serve(AsyncLLM(llm, max_num_requests=config.max_num_requests), config, listener)
    if code:
        raise typer.Exit(code)
