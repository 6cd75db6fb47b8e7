"""Random JSON schemas and regexes, texts that match them, and requests constrained by them."""

from __future__ import annotations

import json
import random
import re
import tempfile
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from pagespec import SamplingParams, StructuredOutputs
from pagespec.engine.logit_edits import LogitEdits
from pagespec.engine.request import Request
from tests.support.models import tiny_model
from tests.support.tokenizers import byte_level, text_of

END = 2
NUM_TOKENS = 266
"""Tokens of the tokenizer; the tiny models have some more columns."""


@cache
def tokenizer() -> Any:
    return byte_level()


def saved_qwen3(**changes: Any) -> str:
    """A new folder with a Qwen3 of two layers and heads of 64, for kernels of a GPU. Its logits
    have more columns than there are tokens. ``changes``: see :func:`.tiny_model`."""
    sizes: dict[str, Any] = {
        "vocab_size": 2048,
        "hidden_size": 256,
        "intermediate_size": 512,
        "num_attention_heads": 8,
        "head_dim": 64,
        "max_position_embeddings": 1024,
    }
    path = tempfile.mkdtemp(prefix="qwen3-")
    model = tiny_model("qwen3", **sizes | changes)
    model.generation_config.eos_token_id = END
    model.save_pretrained(Path(path))
    tokenizer().save_pretrained(path)
    return path


def random_schema(rng: random.Random, depth: int = 2) -> dict[str, Any]:
    kinds = ["integer", "number", "string", "pattern", "enum", "const", "boolean", "null"]
    if depth:
        kinds += ["array", "object", "object", "anyOf"]
    kind = rng.choice(kinds)
    if kind == "integer":
        low = rng.randint(-50, 50)
        return {"type": kind, "minimum": low, "maximum": low + rng.randint(0, 2000)}
    if kind == "number":
        return {"type": kind, "minimum": -1, "exclusiveMaximum": rng.choice([0.5, 3])}
    if kind == "string":
        low = rng.randint(0, 3)
        return {"type": kind, "minLength": low, "maxLength": low + rng.randint(0, 4)}
    if kind == "pattern":
        return {"type": "string", "pattern": f"^{random_regex(rng)}$"}
    if kind == "enum":
        return {"enum": rng.sample([1, "a", None, True, "é", 2.5, "b\n"], rng.randint(1, 4))}
    if kind == "const":
        return {"const": rng.choice([0, "x", [1, {"a": None}]])}
    if kind == "array":
        low = rng.randint(0, 2)
        items = random_schema(rng, depth - 1)
        return {"type": kind, "items": items, "minItems": low, "maxItems": low + rng.randint(0, 2)}
    if kind == "anyOf":
        return {"anyOf": [random_schema(rng, depth - 1) for _ in range(2)]}
    if kind == "object":
        names = rng.sample(["a", "name", "x y", "patternProperties"], rng.randint(1, 3))
        return {
            "type": kind,
            "properties": {name: random_schema(rng, depth - 1) for name in names},
            "required": rng.sample(names, rng.randint(0, len(names))),
            "additionalProperties": False,
        }
    return {"type": kind}


def random_regex(rng: random.Random) -> str:
    pieces = ["a", "[0-9]", "(b|cd)", "[a-z]{1,3}", "x?", "(no|yes|maybe)", "-", "é", "[AB]{2}"]
    return "".join(rng.choices(pieces, k=rng.randint(1, 4)))


def meets(schema: dict[str, Any], value: Any) -> bool:
    """Whether a value meets one of the schemas above."""
    if "enum" in schema or "const" in schema:
        allowed = schema.get("enum", [schema.get("const")])
        return any(value == one and type(value) is type(one) for one in allowed)
    if "anyOf" in schema:
        return any(meets(one, value) for one in schema["anyOf"])
    if not isinstance(value, _TYPES[schema["type"]]) or (
        isinstance(value, bool) and schema["type"] != "boolean"
    ):
        return False
    if isinstance(value, str):
        is_long = schema.get("minLength", 0) <= len(value) <= schema.get("maxLength", 99)
        return is_long and bool(re.fullmatch(schema.get("pattern", "(?s).*").strip("^$"), value))
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        above = value >= schema["minimum"]
        return above and value <= schema.get("maximum", 1e9) and value < schema.get(
            "exclusiveMaximum", 1e9
        )  # fmt: skip
    if isinstance(value, list):
        is_long = schema["minItems"] <= len(value) <= schema["maxItems"]
        return is_long and all(meets(schema["items"], item) for item in value)
    if isinstance(value, dict):
        known = schema["properties"]
        names_fit = set(schema["required"]) <= set(value) <= set(known)
        return names_fit and all(meets(known[name], item) for name, item in value.items())
    return True


_TYPES: dict[str, Any] = {
    "integer": int,
    "number": (int, float),
    "string": str,
    "boolean": bool,
    "null": type(None),
    "array": list,
    "object": dict,
}


def random_outputs(rng: random.Random) -> tuple[StructuredOutputs, Callable[[str], bool]]:
    """A random constraint, and a predicate for texts that match it."""
    kind = rng.choice(["json", "json", "json", "regex", "choice", "grammar"])
    if kind == "json":
        schema = random_schema(rng)
        outputs = StructuredOutputs(json=rng.choice([schema, json.dumps(schema)]))
        return outputs, lambda text: meets(schema, json.loads(text))
    if kind == "regex":
        regex = random_regex(rng)
        return StructuredOutputs(regex=regex), lambda text: bool(re.fullmatch(regex, text))
    if kind == "choice":
        texts = rng.sample(["yes", "no", "a/b", 'say "é"', " x", "\\d\n", "語"], 3)
        return StructuredOutputs(choice=texts), lambda text: text in texts
    grammar = 'start: "(" start ")" | /[a-c]+/'
    return StructuredOutputs(grammar=grammar), _is_nested


def _is_nested(text: str) -> bool:
    inner = text.strip("()")
    depth = text.count("(")
    return bool(re.fullmatch("[a-c]+", inner)) and text == "(" * depth + inner + ")" * depth


def make_request(
    name: str,
    outputs: StructuredOutputs | None,
    rng: random.Random,
    max_tokens: int = 60,
    **params: Any,
) -> Request:
    """Of a random prompt; equal for equal states of ``rng``."""
    prompt = rng.choices(range(3, NUM_TOKENS), k=rng.choice([1, 5, 17]))
    given = {"temperature": rng.choice([0.0, 1.0]), "top_k": rng.choice([0, 5])} | params
    sampling = SamplingParams(max_tokens=max_tokens, structured_outputs=outputs, **given)
    return Request(
        name,
        prompt,
        sampling,
        max_num_tokens=len(prompt) + max_tokens,
        stop_token_ids=frozenset({END}),
        seed=int(name),
        edits=LogitEdits.of(sampling, {END}, []),
    )


def check_output(output: Sequence[int], reason: str | None, is_met: Callable[[str], bool]) -> bool:
    """Whether an output is complete; a complete output must match its constraint."""
    assert max(output, default=0) < NUM_TOKENS
    if reason == "length":
        return False
    assert reason == "stop"
    assert output[-1] == END
    text = text_of(tokenizer(), output)
    assert is_met(text), text
    return True


def save_byte_model(folder: Path, arch: str = "llama", **config: Any) -> str:
    """A tiny model whose tokens are bytes, with an end token."""
    layers = {"num_hidden_layers": 1} if arch == "llama" else {}
    model = tiny_model(arch, **layers, **config)
    model.generation_config.eos_token_id = END
    model.save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    return str(folder)
