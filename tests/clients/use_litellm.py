"""litellm against a server: ``python tests/clients/use_litellm.py URL [URL_OF_CALLS SEED]``.

Imports only litellm and nothing of pagespec, so it runs in any environment. At URL_OF_CALLS, a
request with that seed and a tool must return a tool call.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import urllib.request
from importlib.metadata import version
from typing import Any

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # nothing is fetched when it is imported
import litellm

TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}},
            "required": ["city"],
        },
    },
}
HELLO = [{"role": "user", "content": "Say hello."}]


def settings_for(url: str) -> dict[str, Any]:
    with urllib.request.urlopen(f"{url}/v1/models") as answer:
        name = json.load(answer)["data"][0]["id"]
    return {"model": f"openai/{name}", "api_base": f"{url}/v1", "api_key": "none", "seed": 0}


def main(url: str, url_of_calls: str | None = None, seed: int | None = None) -> None:
    to = settings_for(url)
    whole = litellm.completion(**to, messages=HELLO, max_tokens=12, logprobs=True, top_logprobs=2)
    text = whole.choices[0].message.content
    assert len(whole.choices[0].logprobs.content) == whole.usage.completion_tokens
    chunks = list(
        litellm.completion(**to, messages=HELLO, max_tokens=12, stream=True,
                           stream_options={"include_usage": True})
    )  # fmt: skip
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == text

    async def together() -> list[str]:
        calls = [litellm.acompletion(**to, messages=HELLO, max_tokens=12) for _ in range(8)]
        return [answer.choices[0].message.content for answer in await asyncio.gather(*calls)]

    assert asyncio.run(together()) == [text] * 8
    to_text = {**to, "model": "text-completion-" + to["model"]}
    answer = litellm.text_completion(**to_text, prompt="Say hello.", max_tokens=5)
    assert answer.usage.completion_tokens <= 5
    refusal = ""
    try:
        litellm.completion(**to, messages=HELLO, temperature=-1.0)
    except litellm.BadRequestError as error:
        refusal = str(error)
    assert "temperature" in refusal
    too_long = [{"role": "user", "content": "hello " * 20_000}]
    overflow = ""
    try:
        litellm.completion(**to, messages=too_long)
    except litellm.ContextWindowExceededError as error:
        overflow = str(error)
    assert "maximum context length" in overflow
    if url_of_calls is not None:
        asked = {**settings_for(url_of_calls), "seed": seed, "tools": [TOOL], "messages": HELLO}
        (call,) = litellm.completion(**asked).choices[0].message.tool_calls
        assert call.function.name == "weather"
        chunks = list(litellm.completion(**asked, stream=True))
        rebuilt = litellm.stream_chunk_builder(chunks, messages=HELLO)
        (streamed,) = rebuilt.choices[0].message.tool_calls
        assert json.loads(streamed.function.arguments) == json.loads(call.function.arguments)
        assert rebuilt.choices[0].finish_reason == "tool_calls"
    print(f"litellm {version('litellm')}: ok; it says {text!r}")


if __name__ == "__main__":
    main(*sys.argv[1:3], *map(int, sys.argv[3:]))
