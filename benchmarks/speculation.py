"""Draft tokens of a given acceptance, on pagespec and on vLLM: one table.

    python -m benchmarks.speculation pagespec --model 8b --json ours.json
    PYTHONPATH=$SITE:. python -m benchmarks.speculation vllm --model 8b --k 0 --json plain.json
    PYTHONPATH=$SITE:. python -m benchmarks.speculation vllm --model 8b --k 3 --json drafts.json
    python -m benchmarks.speculation table ours.json plain.json drafts.json

Both engines have random weights, bfloat16, no prefix cache, greedy requests of one length that all
arrive at once. Draft tokens are free: the time of a drafter is not in the table. With
``--drafter-layers`` pagespec also runs a drafter: a model of the same sizes with that many layers.
One layer costs about as much as an MTP layer. Its tokens are replaced by those of the oracle. With
``--drafter-quantization fp8`` its weights are in FP8, with its head.

pagespec: a run without draft tokens records the answers. An oracle then proposes them, each token
right with the given probability, independently of the others. The engine chooses the number of
draft tokens per row, or ``--k`` fixes it. Runs with and without draft tokens take turns in one
process, and all answers must be equal. Each repeat draws other tokens, which are the same in all
engine settings. With few rows one draw is luck, so cells of few rows have more repeats. The table
has their median.

vLLM: its synthetic acceptance (``rejection_sample_method``) accepts draft tokens with the given
probability, whatever they are, so its answers are not those of the model. A process has one number
of draft tokens; 0 is the engine as it is without ``speculative_config``.

``--model tiny`` with pagespec checks on a CPU only that the script runs.
"""

from __future__ import annotations

from benchmarks.gpu import require_gpu

if __name__ == "__main__":
    require_gpu("table", hint="; --model tiny runs on a CPU")  # before torch is imported

import json
import random
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from benchmarks.loads import Json, Model, Quantization, gpu_name, named, vllm_engine
from benchmarks.workload import (
    LARGEST_TOKEN_ID,
    LATENCY,
    Load,
    Workload,
    model_config,
    model_folder,
)
from pagespec.engine.drafting.config import SpeculativeConfig
from pagespec.engine.drafting.costs import StepCosts
from pagespec.engine.drafting.drafters import ModelDrafter, PredictionDrafter

ROWS, ACCEPTANCES = (1, 8, 32, 64, 256), (0.0, 0.6, 0.8, 0.9)
_SEED = 3
_WARM_UP_TOKENS = 24
_LEAST_REPEATS, _ROWS_PER_CELL = 3, 8
_COUNTS = ("num_steps", "num_drafts", "num_draft_tokens", "num_accepted_tokens")

app = typer.Typer(pretty_exceptions_enable=False, help=(__doc__ or "").splitlines()[0])
Rows = Annotated[list[int], typer.Option(help="Repeatable: requests that run together.")]
Acceptances = Annotated[list[float], typer.Option(help="Repeatable: the chance of a draft token.")]
PromptTokens = Annotated[int, typer.Option(min=1)]
OutputTokens = Annotated[int, typer.Option(min=2)]
Repeat = Annotated[
    int, typer.Option(min=0, help="Runs per cell; 0: 3, or more until they have 8 rows.")
]

Run = Callable[[Workload], tuple[float, list[float], list[tuple[int, ...]]]]
"""Serves a workload. Returns its seconds, those until each request finished, and the answers."""


class KnownAnswers:
    """Known answers with wrong tokens in random places.

    Args:
        answers: the answers, by prompt.
        acceptance: the probability that a token is right.
        vocabulary: wrong ids are below it.
        repeat: number of the draw.
    """

    def __init__(
        self,
        answers: Mapping[tuple[int, ...], Sequence[int]],
        acceptance: float,
        vocabulary: int,
        repeat: int = 0,
    ) -> None:
        rng = random.Random(f"{_SEED}-{repeat}")
        self._answers = {
            prompt: [t if rng.random() < acceptance else (t + 1) % vocabulary for t in answer]
            for prompt, answer in answers.items()
        }
        self._answer_of: dict[str, Sequence[int]] = {}  # by request

    def after(self, request: Any, most: int) -> Sequence[int]:
        """At most ``most`` tokens that follow the present ones of a request."""
        answer = self._answer_of.get(request.request_id)
        if answer is None:
            answer = self._answers[tuple(request.token_ids[: request.num_prompt_tokens])]
            self._answer_of[request.request_id] = answer
        begin = len(request.token_ids) - request.num_prompt_tokens
        return answer[begin : begin + most]


class OracleDrafter(PredictionDrafter):
    """Proposes known answers.

    Args:
        fixed: number of draft tokens per row; 0: chosen as for any drafter.
    """

    def __init__(
        self, known: KnownAnswers, config: SpeculativeConfig, costs: StepCosts, fixed: int = 0
    ) -> None:
        super().__init__(config, costs)
        self._known, self._fixed = known, fixed

    def serves(self, _: Any) -> bool:
        return True

    def wants_drafts(self, running: Any, num_others: int) -> bool:
        return self._fixed > 0 or super().wants_drafts(running, num_others)

    def propose(self, request: Any) -> Sequence[int]:
        return self._known.after(request, self._fixed) if self._fixed else super().propose(request)

    def _continuation(self, request: Any, _: Any, most: int) -> Sequence[int]:
        return self._known.after(request, most)


class ModelOracleDrafter(ModelDrafter):
    """Proposes as many tokens of known answers as a model has drafted. Arguments: see
    :class:`OracleDrafter`."""

    def __init__(
        self, known: KnownAnswers, config: SpeculativeConfig, costs: StepCosts, fixed: int = 0
    ) -> None:
        super().__init__(config, costs)
        self._known, self._fixed = known, fixed

    def wants_drafts(self, running: Any, num_others: int) -> bool:
        return self._fixed > 0 or super().wants_drafts(running, num_others)

    def wanted(self, request: Any) -> int:
        return self._fixed or super().wanted(request)

    def _continuation(self, request: Any, drafts: Any, most: int) -> Sequence[int]:
        return self._known.after(request, len(super()._continuation(request, drafts, most)))


class HostGaps:
    """Counts the time during which the device has no step: from the end of ``collect`` with no
    other step in flight until the next step is queued.

    Args:
        runner: its methods ``dispatch`` and ``collect`` are replaced.
    """

    def __init__(self, runner: Any) -> None:
        self.seconds, self._runner = 0.0, runner
        self._num_in_flight, self._free_since = 0, 0.0
        self._dispatch, self._collect = runner.dispatch, runner.collect
        runner.dispatch, runner.collect = self.dispatch, self.collect

    def restart(self) -> None:
        """Forget the time since the last step."""
        self.seconds = self._free_since = 0.0

    def dispatch(self, plan: Any) -> Any:
        begin, packed_s = time.perf_counter(), self._runner.pack_s
        handle = self._dispatch(plan)
        if self._free_since and not self._num_in_flight:
            # On a GPU pack_s includes the launch; on a CPU dispatch also computes the step.
            self.seconds += begin - self._free_since + self._runner.pack_s - packed_s
        self._num_in_flight += 1
        return handle

    def collect(self, handle: Any) -> Any:
        result = self._collect(handle)
        self._num_in_flight -= 1
        self._free_since = time.perf_counter()
        return result


def workload(num_rows: int, num_prompt_tokens: int, num_output_tokens: int) -> Workload:
    """The first ``num_rows`` requests of one stream of random prompts."""
    lengths = (num_prompt_tokens,) * 2, (num_output_tokens,) * 2
    return Load(_SEED, num_rows, *lengths, 0).draw(f"{num_rows} rows")


def num_repeats(repeat: int, num_rows: int) -> int:
    """Runs per cell of this many rows, see :data:`Repeat`."""
    return repeat or max(_LEAST_REPEATS, -(-_ROWS_PER_CELL // num_rows))


@app.command()
def pagespec(
    model: Model,
    json: Json,
    rows: Rows = list(ROWS),  # noqa: B006 - typer copies it
    acceptance: Acceptances = list(ACCEPTANCES),  # noqa: B006
    k: Annotated[int, typer.Option(min=0, help="Draft tokens per row; 0: chosen.")] = 0,
    num_speculative_tokens: Annotated[int, typer.Option(help="Most draft tokens per row.")] = 8,
    prompt_tokens: PromptTokens = 256,
    output_tokens: OutputTokens = 256,
    repeat: Repeat = 0,
    quantization: Quantization = None,
    drafter_layers: Annotated[int, typer.Option(min=0, help="Of a drafter; 0: none.")] = 0,
    drafter_quantization: Annotated[str | None, typer.Option(help="Of a drafter: fp8.")] = None,
) -> None:
    """Measure pagespec."""
    import torch

    import pagespec as engine
    from pagespec.engine.scheduler import DraftCounts

    if drafter_quantization and not drafter_layers:
        raise typer.BadParameter("--drafter-quantization needs --drafter-layers")
    asked: dict[str, Any] = {"num_speculative_tokens": max(k, num_speculative_tokens)}
    settings = {} if quantization is None else {"quantization": quantization}
    with model_folder(model) as folder:
        if drafter_layers:
            asked |= {"method": "draft_model", "model": _drafter(model, folder, drafter_layers)}
            asked["quantization"] = drafter_quantization
        else:
            asked |= {"method": "ngram"}
        begin = time.perf_counter()
        llm = engine.LLM(
            str(folder),
            load_format="dummy",
            max_model_len=max(LATENCY.max_model_len, prompt_tokens + output_tokens),
            max_num_seqs=max(rows),
            enable_prefix_caching=False,
            speculative_config=asked,
            **settings,
        )
        start_s = time.perf_counter() - begin
    scheduler, gaps = llm.engine.scheduler, HostGaps(llm.engine.runner)
    costs = llm.step_costs
    results = _Results(
        json,
        engine=f"pagespec{_drafter_name(drafter_layers, drafter_quantization)}, "
        f"torch {torch.__version__}",
        model=named(model, quantization, "auto", 1),
        gpu=gpu_name(),
        start_s=start_s,
        prompt_tokens=prompt_tokens,
        output_tokens=output_tokens,
        costs_ms=[(n, 1e3 * seconds) for n, seconds in costs.measured],
    )

    def run(load: Workload) -> tuple[float, list[float], list[tuple[int, ...]]]:
        params = [
            engine.SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=n, detokenize=False)
            for n in load.num_outputs
        ]
        begin = time.perf_counter()
        outputs = llm.generate(load.prompts, params, use_tqdm=False)
        seconds = time.perf_counter() - begin
        answers = [tuple(output.outputs[0].token_ids) for output in outputs]
        return seconds, [output.metrics.total_time_s for output in outputs], answers

    def draft(drafter: OracleDrafter | ModelOracleDrafter | None) -> None:
        scheduler.drafter, scheduler.draft_counts = drafter, DraftCounts(drafter)

    for num_rows in rows:
        load = workload(num_rows, prompt_tokens, output_tokens)
        draft(None)
        answers = run(load)[2]
        known = dict(zip(map(tuple, load.prompts), answers, strict=True))

        def oracle(
            chance: float, number: int, known: Any = known
        ) -> OracleDrafter | ModelOracleDrafter:
            kind = ModelOracleDrafter if drafter_layers else OracleDrafter
            answers = KnownAnswers(known, chance, LARGEST_TOKEN_ID, number)
            return kind(answers, llm.config.speculation, costs, k)

        first_s = _first_token_s(run, load)
        for chance in acceptance:
            draft(oracle(chance, 0))
            run(Workload("warm-up", load.prompts, [_WARM_UP_TOKENS] * num_rows))
        for number in range(num_repeats(repeat, num_rows)):
            for chance in (None, *acceptance):
                draft(None if chance is None else oracle(chance, number))
                before = _counts(llm)
                gaps.restart()
                seconds, each_s, found = run(load)
                counts = {name: n - before[name] for name, n in _counts(llm).items()}
                results.add(
                    num_rows,
                    chance,
                    k if chance is not None else None,
                    first_s=first_s,
                    seconds=seconds,
                    mean_s=statistics.mean(each_s),
                    gap_s=gaps.seconds,
                    num_different=sum(a != b for a, b in zip(answers, found, strict=True)),
                    **counts,
                )
    different = sum(sum(cell["num_different"]) for cell in results.cells)
    if different:
        typer.echo(f"{different} answers differ from those without draft tokens", err=True)
        raise typer.Exit(1)


def _drafter(model: str, folder: Path, num_layers: int) -> str:
    """A folder with the ``config.json`` of a model of the same sizes with fewer layers."""
    config = model_config(model)
    config |= {"num_hidden_layers": num_layers, "max_window_layers": num_layers}
    path = folder / "drafter"
    path.mkdir()
    (path / "config.json").write_text(json.dumps(config))
    return str(path)


def _drafter_name(num_layers: int, quantization: str | None) -> str:
    return f"+{num_layers}L{f'-{quantization}' if quantization else ''}" if num_layers else ""


def _counts(llm: Any) -> dict[str, float]:
    stats = llm.stats()
    found = {f"{name}_s": stats.host_s[name] for name in ("schedule", "pack", "commit", "wait")}
    drafts = llm.engine.scheduler.draft_counts  # of one run
    counts = {name: getattr(drafts, name) for name in _COUNTS[1:]}
    return found | {"num_steps": stats.num_steps} | counts


def _first_token_s(run: Run, load: Workload) -> float:
    """The mean time until a request of one output token has finished."""
    first = Workload("first token", load.prompts, [1] * len(load.prompts))
    run(first)
    return statistics.mean(run(first)[1])


class _Results:
    """What was measured, in a file that is rewritten after each run."""

    def __init__(self, path: Path, **about: Any) -> None:
        self._path, self._about = path, about
        self.cells: list[dict[str, Any]] = []
        print(about, flush=True)

    def add(self, rows: int, acceptance: float | None, k: int | None, **values: float) -> None:
        """Append a run to its cell. ``acceptance`` and ``k`` are None without draft tokens."""
        key = {"rows": rows, "acceptance": acceptance, "k": k}
        cell = next((c for c in self.cells if c.items() >= key.items()), None)
        if cell is None:
            cell = {**key, **{name: [] for name in values}}
            self.cells.append(cell)
        for name, value in values.items():
            cell[name].append(value)
        self._path.write_text(json.dumps({**self._about, "cells": self.cells}) + "\n")
        print(*(f"{name} {value}" for name, value in key.items()), end=", ", flush=True)
        print(f"{values['seconds']:.3f} s in {values['num_steps']} steps", flush=True)


class FreeDrafts:
    """A proposer of vLLM (method "custom_class"): random tokens for each row."""

    def __init__(self, config: Any) -> None:
        self._k = config.speculative_config.num_speculative_tokens
        rng = random.Random(_SEED)
        self._tokens = [rng.randrange(LARGEST_TOKEN_ID) for _ in range(4099)]
        self._next = 0

    def propose(self, sampled: list[list[int]], *_: Any, **__: Any) -> list[list[int]]:
        """``k`` draft tokens for each row that sampled any token."""
        drafts: list[list[int]] = []
        for tokens in sampled:
            if self._next + self._k > len(self._tokens):
                self._next = 0
            drafts.append(self._tokens[self._next : self._next + self._k] if tokens else [])
            self._next += self._k
        return drafts

    def load_model(self, _: Any) -> None:
        """There is no model."""


@app.command()
def vllm(
    model: Model,
    json: Json,
    k: Annotated[int, typer.Option(min=0, help="Draft tokens per row; 0: none.")],
    rows: Rows = list(ROWS),  # noqa: B006
    acceptance: Acceptances = list(ACCEPTANCES),  # noqa: B006
    prompt_tokens: PromptTokens = 256,
    output_tokens: OutputTokens = 256,
    repeat: Repeat = 0,
    quantization: Quantization = None,
) -> None:
    """Measure vLLM, which must be in PYTHONPATH."""
    settings: dict[str, Any] = {"quantization": quantization}
    if k:
        settings["speculative_config"] = {
            "method": "custom_class",
            "model": "benchmarks.speculation.FreeDrafts",
            "num_speculative_tokens": k,
            "rejection_sample_method": "synthetic",
            "synthetic_acceptance_rates": [1.0] * k,
        }
    max_model_len = max(LATENCY.max_model_len, prompt_tokens + output_tokens + k)
    with model_folder(model) as folder:
        engine, llm, start_s = vllm_engine(model, folder, max_model_len=max_model_len, **settings)
    import torch

    results = _Results(
        json,
        engine=f"vLLM {engine.__version__}, torch {torch.__version__}",
        model=named(model, quantization, "auto", 1),
        gpu=gpu_name(),
        start_s=start_s,
        prompt_tokens=prompt_tokens,
        output_tokens=output_tokens,
    )
    finished: dict[str, float] = {}  # time by request
    num_steps = 0
    step = llm.llm_engine.step

    def timed_step() -> Any:
        nonlocal num_steps
        outputs = step()
        now = time.perf_counter()
        num_steps += 1
        finished.update((output.request_id, now) for output in outputs if output.finished)
        return outputs

    llm.llm_engine.step = timed_step

    def run(load: Workload) -> tuple[float, list[float], list[tuple[int, ...]]]:
        params = [
            engine.SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=n, detokenize=False)
            for n in load.num_outputs
        ]
        prompts = [{"prompt_token_ids": prompt} for prompt in load.prompts]
        finished.clear()
        begin = time.perf_counter()
        outputs = llm.generate(prompts, params, use_tqdm=False)
        seconds = time.perf_counter() - begin
        answers = [tuple(output.outputs[0].token_ids) for output in outputs]
        if [len(answer) for answer in answers] != load.num_outputs:
            raise RuntimeError(f"{load.name}: answers of other lengths than {load.num_outputs[0]}")
        return seconds, [end - begin for end in finished.values()], answers

    def accept(worker: Any, chance: float) -> None:
        """Change the probability that a draft token is accepted if those before it are."""
        worker.model_runner.rejection_sampler.synthetic_conditional_rates.fill_(chance)

    chances: list[float | None] = list(acceptance) if k else [None]
    for num_rows in rows:
        load = workload(num_rows, prompt_tokens, output_tokens)
        first_s = _first_token_s(run, load)
        run(Workload("warm-up", load.prompts, [_WARM_UP_TOKENS] * num_rows))
        for _ in range(num_repeats(repeat, num_rows)):
            for chance in chances:
                if chance is not None:
                    llm.collective_rpc(accept, args=(chance,))
                num_steps = 0
                seconds, each_s, _answers = run(load)
                results.add(
                    num_rows,
                    chance,
                    k or None,
                    first_s=first_s,
                    seconds=seconds,
                    mean_s=statistics.mean(each_s),
                    num_steps=num_steps,
                )


# The table ----------------------------------------------------------------------------------------


@app.command()
def table(files: Annotated[list[Path], typer.Argument(help="What was measured.")]) -> None:
    """Print one table per model.

    "ms" is the mean time per token of a request after its first one. "tok/s" is over whole runs,
    prompts included. "x" is their ratio to the fastest run of the engine without draft tokens,
    above 1 if drafts are faster; "x vLLM" to the fastest cell of vLLM with the same acceptance.
    "gap" is the time per step during which the device has no step.
    """
    results = [json.loads(path.read_text()) for path in files if path.exists()]
    for model in dict.fromkeys(result["model"] for result in results):
        chosen = [result for result in results if result["model"] == model]
        about = chosen[0]
        typer.echo(
            f"\n{model}, random weights, {about['gpu']}, {about['prompt_tokens']} tokens in and "
            f"{about['output_tokens']} out, medians"
        )
        for result in chosen:
            typer.echo(f"  {result['engine']}: started in {result['start_s']:.1f} s")
            if "costs_ms" in result:
                shown = ", ".join(f"{n}: {ms:.3f}" for n, ms in result["costs_ms"])
                typer.echo(f"  ms of a step by its tokens: {shown}")
            different = sum(sum(cell.get("num_different", ())) for cell in result["cells"])
            if result["engine"].startswith("pagespec"):
                typer.echo(f"  answers that differ from those without draft tokens: {different}")
        typer.echo(_HEADER)
        for line in lines(chosen):
            typer.echo(line)


_HEADER = (
    f"{'rows':>5} {'acceptance':>10} {'engine':>15} {'k':>5} {'ms (min to max)':>26} {'x':>5} "
    f"{'x vLLM':>6} {'tok/s':>7} {'x':>5} {'tok/step':>8} {'accepted':>8} {'gap ms':>7}"
)


def lines(results: list[dict[str, Any]]) -> list[str]:
    """The lines of a model's table, in the order of rows and acceptance. ``k`` is the mean number
    of draft tokens of the rows that have any."""
    cells = [
        {"engine": name, "base": name.split("+")[0], **cell, **figures(result, cell)}
        for result in results
        for name in [result["engine"].split()[0].rstrip(",")]
        for cell in result["cells"]
    ]

    def fastest(**key: Any) -> dict[str, Any]:
        found = [cell for cell in cells if cell.items() >= key.items()]
        return min(found, key=lambda cell: cell["ms"], default={})

    found = []
    for cell in sorted(cells, key=lambda c: (c["rows"], -1 if c["k"] is None else c["acceptance"])):
        key = {"rows": cell["rows"], "acceptance": cell["acceptance"]}
        # With a drafter, steps without draft tokens compute its positions too.
        plain = fastest(rows=cell["rows"], base=cell["base"], k=None)
        peer = fastest(engine="vLLM", **key) if cell["engine"] != "vLLM" else {}
        spread = f"{cell['ms']:.3f} ({cell['low']:.3f} to {cell['high']:.3f})"
        found.append(
            f"{cell['rows']:>5} {_text(cell['acceptance'], 'g', 'plain'):>10} "
            f"{cell['engine']:>15} {cell['drafts']:>5} {spread:>26} "
            f"{_faster(plain.get('ms'), cell['ms']):>5} {_faster(peer.get('ms'), cell['ms']):>6} "
            f"{cell['tokens_per_s']:>7,.0f} "
            f"{_faster(cell['tokens_per_s'], plain.get('tokens_per_s')):>5} "
            f"{cell['tokens_per_step']:>8.2f} {_text(cell['accepted'], '.0%'):>8} "
            f"{_text(cell['gap_ms'], '.3f'):>7}"
        )
    return found


def figures(result: Mapping[str, Any], cell: Mapping[str, Any]) -> dict[str, Any]:
    """What a line of the table shows of a cell. ``tokens_per_step`` is per row, as if each row
    took part in each step."""
    num_tokens, num_runs = cell["rows"] * result["output_tokens"], len(cell["seconds"])
    ms = [
        1e3 * (mean - first) / (result["output_tokens"] - 1)
        for mean, first in zip(cell["mean_s"], cell["first_s"], strict=True)
    ]
    num_steps = sum(cell["num_steps"])
    num_drafts, num_draft_tokens, num_accepted = (sum(cell.get(name, ())) for name in _COUNTS[1:])
    if cell["k"] is None:
        drafts = "-"
    elif "num_drafts" in cell:  # of the rows that have draft tokens
        drafts = f"{num_draft_tokens / num_drafts:.1f}" if num_drafts else "0"
    else:
        drafts = str(cell["k"])
    return {
        "ms": statistics.median(ms),
        "low": min(ms),
        "high": max(ms),
        "tokens_per_s": num_tokens / statistics.median(cell["seconds"]),
        "tokens_per_step": num_tokens * num_runs / num_steps / cell["rows"],
        "drafts": drafts,
        "accepted": num_accepted / num_draft_tokens if num_draft_tokens else None,
        "gap_ms": 1e3 * sum(cell["gap_s"]) / num_steps if "gap_s" in cell else None,
    }


def _faster(over: float | None, under: float | None) -> str:
    return f"{over / under:.2f}" if over and under else "-"


def _text(value: float | None, form: str, otherwise: str = "-") -> str:
    return otherwise if value is None else format(value, form)


if __name__ == "__main__":
    app()
