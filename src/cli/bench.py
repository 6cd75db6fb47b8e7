"""``pagespec bench``: offline throughput on random prompts, as a table or as JSON."""

from __future__ import annotations

import json
import math
import platform
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar

import typer

from .. import __version__
from ..engine.sampling_params import SamplingParams
from ..errors import EngineError
from . import make_llm
from .command import note, option
from .options import EngineOptions

if TYPE_CHECKING:
    from ..engine.outputs import EngineStats, RequestOutput
    from ..llm import LLM

_WARMUP_PROMPTS = 4
_WARMUP_TOKENS = 4
_VOCABULARY_WITHOUT_TOKENIZER = 256


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class Workload:
    """Requests with equal prompt and output lengths, all submitted at once."""

    PANEL: ClassVar = None

    num_prompts: int = option(32, None, "Number of requests, all submitted at once.", min=1)
    input_len: int = option(128, None, "Tokens per prompt (random ids).", min=1)
    output_len: int = option(64, None, "Tokens generated per request.", min=1)
    temperature: float = option(1.0, None, "0 is greedy.")
    seed: int = option(0, None, "Seed of the prompts and of the sampling.")

    def prompts(self, vocabulary: int) -> list[list[int]]:
        """Random ids: no two prompts share a prefix, so the prefix cache has no effect."""
        chance = random.Random(self.seed)
        return [
            [chance.randrange(vocabulary) for _ in range(self.input_len)]
            for _ in range(self.num_prompts)
        ]

    def params(self, max_tokens: int) -> SamplingParams:
        return SamplingParams(
            temperature=self.temperature, max_tokens=max_tokens, ignore_eos=True, seed=self.seed
        )


def report(engine: EngineOptions, workload: Workload, *, warmup: bool, as_json: bool) -> None:
    """Run the workload and print the measurements.

    Raises:
        PagespecError: an option is refused, or the engine did not generate every token.
    """
    params = workload.params(workload.output_len)
    began = time.perf_counter()
    llm = make_llm.start_llm(engine)
    load_seconds = time.perf_counter() - began
    tokenizer: Any = llm.tokenizer
    vocabulary = len(tokenizer) if tokenizer is not None else _VOCABULARY_WITHOUT_TOKENIZER
    if warmup:
        _warm_up(llm, workload, vocabulary)
    note(f"running {workload.num_prompts} requests on {_device(llm)} ...")
    prompts = workload.prompts(vocabulary)
    before = llm.stats() if engine.config.speculation is not None else None
    began = time.perf_counter()
    results = llm.generate(prompts, params)
    seconds = time.perf_counter() - began
    numbers = _measured(results, workload, seconds) | {"load_seconds": round(load_seconds, 3)}
    if before is not None:
        numbers |= _drafted(before, llm.stats())
    numbers |= _setting(llm, engine)
    typer.echo(json.dumps(numbers) if as_json else _table(numbers))


def _warm_up(llm: LLM, workload: Workload, vocabulary: int) -> None:
    """Run a few tokens of other prompts (another seed, so that none of their blocks is hit)."""
    few = replace(
        workload,
        num_prompts=min(_WARMUP_PROMPTS, workload.num_prompts),
        output_len=min(_WARMUP_TOKENS, workload.output_len),
        seed=workload.seed + 1,
    )
    llm.generate(few.prompts(vocabulary), few.params(few.output_len), use_tqdm=False)


def _measured(
    results: Sequence[RequestOutput], workload: Workload, seconds: float
) -> dict[str, Any]:
    num_in = sum(len(result.prompt_token_ids) for result in results)
    num_out = sum(len(result.outputs[0].token_ids) for result in results)
    due = workload.num_prompts * workload.output_len
    if num_out != due:
        # A run that ended early would seem fast: raise instead of printing a wrong figure.
        raise EngineError(f"{num_out} tokens were generated instead of {due}")
    waits = [result.metrics.time_to_first_token_s for result in results]
    first = [wait for wait in waits if wait is not None]
    return {
        "requests": len(results),
        "tokens_in": num_in,
        "tokens_out": num_out,
        "seconds": round(seconds, 3),
        "output_tokens_per_second": round(num_out / seconds, 1),
        "total_tokens_per_second": round((num_in + num_out) / seconds, 1),
        "ttft_median_s": round(percentile(first, 50), 4),
        "ttft_p99_s": round(percentile(first, 99), 4),
        "preemptions": sum(result.metrics.num_preemptions for result in results),
    }


def _drafted(before: EngineStats, after: EngineStats) -> dict[str, Any]:
    """Draft tokens between two snapshots."""
    num_drafts = after.num_drafts - before.num_drafts
    num_tokens = after.num_draft_tokens - before.num_draft_tokens
    num_accepted = after.num_accepted_tokens - before.num_accepted_tokens
    return {
        "drafts": num_drafts,
        "draft_tokens": num_tokens,
        "accepted_tokens": num_accepted,
        "acceptance": round(num_accepted / num_tokens, 3) if num_tokens else None,
        "accepted_per_draft": round(num_accepted / num_drafts, 2) if num_drafts else None,
    }


def percentile(values: Sequence[float], percent: float) -> float:
    """The smallest value that at least ``percent`` of the values do not exceed (nearest rank)."""
    if not values:
        return math.nan
    rank = max(1, math.ceil(len(values) * percent / 100))
    return sorted(values)[rank - 1]


def _device(llm: LLM) -> str:
    import torch

    where = torch.device(llm.device)
    if where.type == "cuda":
        return torch.cuda.get_device_name(where)
    number = torch.get_num_threads()
    return f"cpu, {number} thread{'s' * (number != 1)}, {platform.machine()}"


def _setting(llm: LLM, engine: EngineOptions) -> dict[str, Any]:
    import torch
    import transformers

    return {
        "model": make_llm.model_label(engine),
        "dtype": engine.config.dtype,
        "compile": engine.config.compile,
        "device": _device(llm),
        "pagespec": __version__,
        "torch": str(torch.__version__),
        "transformers": transformers.__version__,
        "python": platform.python_version(),
    }


def _table(numbers: dict[str, Any]) -> str:
    width = max(len(name) for name in numbers)
    return "\n".join(f"{name:<{width}}  {value}" for name, value in numbers.items())
