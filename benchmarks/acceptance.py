"""Draft tokens of SmolLM2-135M on a CPU: acceptance, tokens per step and CPU time.

    OMP_NUM_THREADS=1 python -m benchmarks.acceptance [--requests 1 --requests 4] [--repeat 3]
        [--output-tokens 64] [--json out.json]

One engine serves the same prompts without draft tokens and with each method, in turns, so that the
load of the machine affects all alike. Rates are output tokens per second of the process's CPU time,
prompts included. Each run starts with an empty drafter: "suffix" has no earlier answers. All
answers must be equal to those without draft tokens.
"""

from __future__ import annotations

import json as json_text
import platform
import statistics
import time
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from pagespec import LLM, SamplingParams, embedded_model_path
from pagespec.engine.drafting.config import SpeculativeConfig
from pagespec.engine.drafting.drafters import make_drafter
from pagespec.engine.scheduler import DraftCounts

METHODS = ("ngram", "suffix")
TEMPERATURES = (0.0, 0.8)
LEAST_SPEED = 0.97
_TEXTS = (
    "The harbour of Lisse was built in 1734 for forty fishing boats. In 1871 a storm broke the "
    "northern wall, and the town council paid for a new one of granite. Today the harbour has a "
    "market, a small museum and a school for sailing, and most of the boats carry visitors.",
    "Bees find their way by the sun. When the sky is covered they use the pattern of polarised "
    "light, which they can see through small gaps in the clouds. A bee that has found flowers "
    "dances in the hive: the angle of the dance shows the direction, and its length the distance.",
)
_CODE = (
    "def mean(values):\n    total = 0\n    for value in values:\n        total += value\n"
    "    return total / len(values)\n",
    "class Stack:\n    def __init__(self):\n        self.items = []\n\n"
    "    def push(self, item):\n        self.items.append(item)\n",
)
KINDS = {
    "summarise": [f"Summarise this text in {n} sentences: {t}" for t in _TEXTS for n in (2, 3)],
    "edit": [
        f"Repeat this text, but replace every {word}: {text}"
        for text, words in zip(
            _TEXTS, (("1734 by 1740", "town by city"), ("sun by moon", "bee by wasp")), strict=True
        )
        for word in words
    ],
    "code": [
        f"{task} this Python code:\n{code}"
        for code in _CODE
        for task in ("Add docstrings to", "Add type hints to")
    ],
    "free": [
        "Write a short story about a lighthouse.",
        "Why is the sky blue?",
        "Give me advice for a first day at work.",
        "Describe a city that floats in the air.",
    ],
}


def main(
    requests: Annotated[list[int], typer.Option(help="Repeatable: 1 to 4 together.")] = [1, 4],  # noqa: B006
    kind: Annotated[list[str], typer.Option(help="Repeatable.")] = list(KINDS),  # noqa: B006
    output_tokens: Annotated[int, typer.Option(min=2)] = 64,
    repeat: Annotated[int, typer.Option(min=1)] = 3,
    json: Annotated[Path | None, typer.Option(help="Everything measured.")] = None,
) -> None:
    """Measure, and print one line per number of requests, kind and temperature."""
    drafts = {"method": "ngram", "num_speculative_tokens": 8}
    model = str(embedded_model_path())
    llm = LLM(model, speculative_config=drafts, enable_prefix_caching=False, seed=0)
    costs = llm.step_costs
    print(
        f"SmolLM2-135M, {platform.processor() or platform.machine()}, torch {torch.__version__}, "
        f"{torch.get_num_threads()} threads, {output_tokens} tokens; CPU ms of a step by tokens: "
        + ", ".join(f"{n}: {1e3 * seconds:.0f}" for n, seconds in costs.measured)
    )
    print(f"{'requests':>8} {'kind':<10} {'T':>4} {'plain tok/s':>11} {'spread':>6}", end="")
    print(*(f" {name:>8} accepted tok/step    x" for name in METHODS), sep="", flush=True)
    _answers(llm, KINDS["free"][:2], 0.0, 4)  # a warm-up
    cells = []
    for num_requests in requests:
        for name in kind:
            for temperature in TEMPERATURES:
                cell = _cell(
                    llm, costs, KINDS[name], num_requests, temperature, output_tokens, repeat
                )
                cells.append(
                    {"requests": num_requests, "kind": name, "temperature": temperature, **cell}
                )
                print(line(cells[-1]), flush=True)
                if json is not None:
                    json.write_text(json_text.dumps(cells) + "\n")
    speeds = [cell[method]["x"] for cell in cells for method in METHODS]
    num_below, num_different = (
        sum(x < LEAST_SPEED for x in speeds),
        sum(c["num_different"] for c in cells),
    )
    print(f"{num_below} of {len(speeds)} cells below {LEAST_SPEED}; {num_different} answers differ")
    if num_different:
        raise typer.Exit(1)


def _cell(
    llm: LLM,
    costs: Any,
    prompts: list[str],
    num_requests: int,
    temperature: float,
    num_output_tokens: int,
    repeat: int,
) -> dict[str, Any]:
    """All runs of one line: of the prompts together, or one after the other for one request."""
    batches = [prompts[:num_requests]] if num_requests > 1 else [[text] for text in prompts[:2]]
    seconds: dict[str, list[float]] = {method: [] for method in ("plain", *METHODS)}
    counts: dict[str, tuple[int, int, int, int]] = {}
    answers: dict[str, list[Any]] = {}
    for _ in range(repeat):
        for method, times in seconds.items():
            config = SpeculativeConfig(method=method, num_speculative_tokens=8)
            drafter = None if method == "plain" else make_drafter(config, costs)
            scheduler = llm.engine.scheduler
            scheduler.drafter, scheduler.draft_counts = drafter, DraftCounts(drafter)
            num_steps, begin = scheduler.num_steps, time.process_time()
            answers[method] = [
                _answers(llm, batch, temperature, num_output_tokens) for batch in batches
            ]
            times.append(time.process_time() - begin)
            found = scheduler.draft_counts
            num_tokens = sum(len(answer) for batch in answers[method] for answer in batch)
            counts[method] = (
                num_tokens,
                scheduler.num_steps - num_steps,
                found.num_draft_tokens,
                found.num_accepted_tokens,
            )
    plain_s = statistics.median(seconds["plain"])
    result: dict[str, Any] = {"seconds": seconds, "plain": counts["plain"][0] / plain_s}
    result["num_different"] = sum(answers[method] != answers["plain"] for method in METHODS)
    for method in METHODS:
        num_tokens, num_steps, num_drafts, num_accepted = counts[method]
        result[method] = {
            "x": plain_s / statistics.median(seconds[method]),
            "tokens_per_step": num_tokens / num_steps / len(batches[0]),
            "accepted": num_accepted / num_drafts if num_drafts else 0.0,
        }
    return result


def _answers(llm: LLM, texts: list[str], temperature: float, num_tokens: int) -> list[list[int]]:
    params = [
        SamplingParams(temperature=temperature, seed=i, max_tokens=num_tokens)
        for i in range(len(texts))
    ]
    messages = [[{"role": "user", "content": text}] for text in texts]
    return [output.outputs[0].token_ids for output in llm.chat(messages, params, use_tqdm=False)]


def line(cell: dict[str, Any]) -> str:
    """A line of the table; "x" is the rate over the plain one; "spread" is that of
    the plain CPU times, largest minus smallest."""
    times = cell["seconds"]["plain"]
    spread = (max(times) - min(times)) / statistics.median(times)
    text = f"{cell['requests']:>8} {cell['kind']:<10} {cell['temperature']:>4} "
    text += f"{cell['plain']:>11.1f} {spread:>6.1%}"
    for method in METHODS:
        found = cell[method]
        text += f" {'':>8} {found['accepted']:>8.0%} {found['tokens_per_step']:>8.2f}"
        text += f" {found['x']:>4.2f}"
    return text


if __name__ == "__main__":
    typer.run(main)
