"""langchain-openai against a server: ``python use_langchain.py URL [URL_OF_CALLS SEED]``.

Imports only langchain-openai and nothing of pagespec, so it runs in any environment. At
URL_OF_CALLS, a request with that seed and a tool must return a tool call. Without URL_OF_CALLS, the
server's model must be able to write an object of a schema.
"""

from __future__ import annotations

import json
import sys
import urllib.request
from importlib.metadata import version
from typing import Any, Literal

from langchain_openai import ChatOpenAI, OpenAI
from pydantic import BaseModel, ConfigDict


class Choice(BaseModel):
    """Which of two."""

    model_config = ConfigDict(extra="forbid")

    city: Literal["Bern", "Oslo"]


class weather(BaseModel):
    """The weather of a city."""

    city: str


def settings_for(url: str) -> dict[str, Any]:
    with urllib.request.urlopen(f"{url}/v1/models") as answer:
        name = json.load(answer)["data"][0]["id"]
    return {"model": name, "base_url": f"{url}/v1", "api_key": "none", "seed": 0}


def main(url: str, url_of_calls: str | None = None, seed: int | None = None) -> None:
    to = settings_for(url)
    chat = ChatOpenAI(**to, max_completion_tokens=12)
    whole = chat.invoke("Say hello.")
    assert whole.usage_metadata["output_tokens"] <= 12
    assert "".join(str(chunk.content) for chunk in chat.stream("Say hello.")) == whole.content
    assert [a.content for a in chat.batch(["Say hello."] * 4)] == [whole.content] * 4
    told = ChatOpenAI(**to, max_completion_tokens=5, logprobs=True, top_logprobs=1).invoke("Hi.")
    assert len(told.response_metadata["logprobs"]["content"]) <= 5
    assert isinstance(OpenAI(**to, max_tokens=5).invoke("Say hello."), str)
    if url_of_calls is None:
        llm = ChatOpenAI(**to, temperature=0.0, max_completion_tokens=100)
        for method in "json_schema", "function_calling":
            chosen = llm.with_structured_output(Choice, method=method).invoke("Bern or Oslo?")
            assert isinstance(chosen, Choice), (method, chosen)
    else:
        asked = ChatOpenAI(**{**settings_for(url_of_calls), "seed": seed}).bind_tools([weather])
        (call,) = asked.invoke("How warm is it?").tool_calls
        assert call["name"] == "weather"
        chunks = list(asked.stream("How warm is it?"))
        joined = chunks[0]
        for chunk in chunks[1:]:
            joined = joined + chunk
        assert joined.tool_calls == [call | {"id": joined.tool_calls[0]["id"]}]
    print(f"langchain-openai {version('langchain-openai')}: ok; it says {whole.content!r}")


if __name__ == "__main__":
    main(*sys.argv[1:3], *map(int, sys.argv[3:]))
