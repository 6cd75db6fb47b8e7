"""Stands in for ``vllm serve`` in tests: its options, and completions that say "word" for each
token. Run as a script, by a package ``vllm`` that a test makes.

The environment variable ``FAKE_VLLM_FAULT`` makes it "exit" instead of serving, or answer with
tokens that are "short" of the requested ones.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
from collections.abc import AsyncIterator
from typing import Any

import uvicorn
from fastapi import FastAPI, Request
from fastapi.responses import Response, StreamingResponse

app = FastAPI()
_FAULT = os.environ.get("FAKE_VLLM_FAULT")


@app.get("/health")
async def health() -> Response:
    return Response()


@app.get("/version")
async def version() -> dict[str, str]:
    return {"version": "0.fake"}


@app.post("/v1/completions")
async def completions(request: Request) -> Any:
    body = await request.json()
    assert body["model"] == "model"
    assert body["ignore_eos"]
    num_prompt, num_tokens = len(body["prompt"]), body["max_tokens"] - (_FAULT == "short")
    usage = {"prompt_tokens": num_prompt, "completion_tokens": num_tokens}
    if not body["stream"]:
        return {"choices": [{"text": "word " * num_tokens}], "usage": usage}

    async def events() -> AsyncIterator[str]:
        for _ in range(num_tokens):
            await asyncio.sleep(0.002)
            yield _event({"choices": [{"index": 0, "text": "word\n\n"}]})
        yield _event({"choices": [], "usage": usage})
        yield "data: [DONE]\n\n"

    return StreamingResponse(events(), media_type="text/event-stream")


def _event(content: dict[str, Any]) -> str:
    return f"data: {json.dumps(content, separators=(',', ':'))}\n\n"


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("command", choices=["serve"])
    parser.add_argument("folder")
    for name in ("load-format", "served-model-name", "max-num-seqs", "max-model-len", "host"):
        parser.add_argument(f"--{name}", required=True)
    parser.add_argument("--port", type=int)
    for name in ("disable-uvicorn-access-log", "no-enable-prefix-caching"):
        parser.add_argument(f"--{name}", action="store_true", required=True)
    options = parser.parse_args()
    if _FAULT == "exit":
        sys.exit("no known GPU")
    uvicorn.run(app, host=options.host, port=options.port, access_log=False)


if __name__ == "__main__":
    main()
