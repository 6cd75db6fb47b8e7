"""Ray Data's HTTP processor against a server: ``python use_ray.py URL``. Needs ``ray[data]``."""

from __future__ import annotations

import json
import sys
import urllib.request
from importlib.metadata import version
from typing import Any

import ray
from ray.data.llm import HttpRequestProcessorConfig, build_processor

NUM_ROWS = 24


def main(url: str) -> None:
    with urllib.request.urlopen(f"{url}/v1/models") as answer:
        name = json.load(answer)["data"][0]["id"]

    def payload(row: dict[str, Any]) -> dict[str, Any]:
        messages = [{"role": "user", "content": f"Say {row['id']}."}]
        asked = {"model": name, "messages": messages, "max_tokens": 6, "seed": int(row["id"])}
        return {"payload": asked}

    def read(row: dict[str, Any]) -> dict[str, Any]:
        choice = row["http_response"]["choices"][0]
        return {"text": choice["message"]["content"], "reason": choice["finish_reason"]}

    config = HttpRequestProcessorConfig(
        url=f"{url}/v1/chat/completions", concurrency=1, batch_size=8, qps=1000
    )
    processor = build_processor(config, preprocess=payload, postprocess=read)
    rows = processor(ray.data.range(NUM_ROWS)).take_all()
    assert len(rows) == NUM_ROWS
    assert all(row["reason"] in ("stop", "length") for row in rows)
    print(f"ray {version('ray')}: ok; it says {rows[0]['text']!r}")


if __name__ == "__main__":
    main(sys.argv[1])
