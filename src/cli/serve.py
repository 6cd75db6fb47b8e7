"""``pagespec serve``: the OpenAI-compatible HTTP server."""

from __future__ import annotations

import os
from typing import Any

import typer

from ..errors import PagespecError
from ..server.config import ServerConfig
from . import make_llm
from .command import Option, options_of
from .options import EngineOptions

KEY_VARIABLE = "PAGESPEC_API_KEY"


class ServerOptions:
    """Options of the server; ``values`` by names of ``ServerConfig``."""

    def __init__(self, **values: Any) -> None:
        self.values = values

    @staticmethod
    def options() -> tuple[Option, ...]:
        """The settings that have an option, each in its panel of the help."""
        return options_of(ServerConfig, None)


def server_config(engine: EngineOptions, server: ServerOptions) -> ServerConfig:
    """Raises:
    PagespecError: FastAPI is not installed, or an option is outside its limits.
    """
    try:
        import fastapi  # noqa: F401
        import uvicorn  # noqa: F401
    except ImportError as error:
        needed = "serving needs more packages: pip install 'pagespec[server]'"
        raise PagespecError(needed) from error
    values = {name: value for name, value in server.values.items() if value is not None}
    keys = [key.strip() for key in os.environ.get(KEY_VARIABLE, "").split(",")]
    values["api_keys"] = (*values.get("api_keys", ()), *filter(None, keys))
    return ServerConfig(model=make_llm.model_label(engine), **values)


def serve_model(engine: EngineOptions, server: ServerOptions) -> None:
    """Load the model and serve it until a signal.

    Raises:
        PagespecError, OSError: an option, the model or the address is refused.
    """
    config = server_config(engine, server)
    from ..server.requests import set_up_logs
    from ..server.run import listen, serve
    from ..serving.async_llm import AsyncLLM

    set_up_logs(config.log_json)
    with listen(config) as listener:
        llm = make_llm.start_llm(engine)
        code = serve(AsyncLLM(llm, max_num_requests=config.max_num_requests), config, listener)
    if code:
        raise typer.Exit(code)
