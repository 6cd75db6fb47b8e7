"""``pagespec generate --prompt``: prints answers to stdout, times and counts to stderr."""

from __future__ import annotations

import time
from collections.abc import Sequence

import typer

from ..engine.inputs import require_unicode
from ..engine.outputs import RequestMetrics
from . import make_llm
from .command import note
from .options import EngineOptions, SamplingOptions


def answer_prompts(
    prompts: Sequence[str], engine: EngineOptions, sampling: SamplingOptions, *, chat: bool | None
) -> None:
    """Answer all prompts in one batch and print them in order.

    Raises:
        PagespecError: a prompt or an option is refused; earlier answers were printed already.
    """
    for text in prompts:
        require_unicode("--prompt", text)
    sampling.params(0)  # raise before a slow load
    llm = make_llm.start_llm(engine)
    defaults = make_llm.sampling_defaults(llm)
    params = [sampling.params(i, defaults=defaults) for i in range(len(prompts))]
    in_template = llm.chat_reader.has_template if chat is None else chat
    make_llm.note_template(llm, in_template=in_template, is_default=chat is None)
    given = [make_llm.read_message(llm, text) if in_template else text for text in prompts]
    requests = list(zip(given, params, strict=True))
    num_in = num_out = 0
    last: RequestMetrics | None = None
    began = time.perf_counter()
    results = llm.generate_iter(requests, window=len(requests))
    for text, result in zip(prompts, results, strict=True):
        if isinstance(result, Exception):
            raise result
        for answer in result.outputs:
            number = f" ({answer.index + 1} of {sampling.n})" if sampling.n > 1 else ""
            if len(prompts) > 1 or number:
                typer.echo(f"==> {text}{number} <==")
            typer.echo(answer.text)
            num_out += len(answer.token_ids)
        num_in += len(result.prompt_token_ids)
        last = result.metrics
    seconds = time.perf_counter() - began
    cost = (
        f"{num_in} prompt tokens in, {num_out} tokens out in {seconds:.2f} s: "
        f"{num_out / max(seconds, 1e-9):.1f} tokens/s"
    )
    is_one = len(prompts) == sampling.n == 1
    note(cost + (_pace(last) if is_one and last is not None else ""))


def _pace(metrics: RequestMetrics) -> str:
    """The time to the first token, and the decode rate after it."""
    first, rate = metrics.time_to_first_token_s, metrics.tokens_per_second
    if first is None or rate is None:
        return ""
    return f" (first after {first:.2f} s, then {rate:.1f} tokens/s)"
