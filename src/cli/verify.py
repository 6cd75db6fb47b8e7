"""``pagespec verify``: checks schedule transparency on this machine."""

from __future__ import annotations

import dataclasses
import json
import logging
import subprocess
import sys
import time
from typing import TYPE_CHECKING, Any

import typer

from ..engine.config import EngineConfig
from ..errors import InvalidInputError, PagespecError
from ..startup import log_shown
from . import make_llm as start
from .command import note
from .options import EngineOptions

if TYPE_CHECKING:
    from ..verify import GateReport

# Largest id in prompts, plus 1: every model has these ids, and few of them are special.
_MAX_VOCABULARY = 50_000


def verify_schedules(
    engine: EngineOptions, *, quick: bool, only_control: bool = False, only_drafts: bool = False
) -> None:
    """Run the gate and print a verdict; exit code 1 unless every group shows transparency.

    On a GPU the controls run first, in a separate process of this command with ``only_control``,
    which prints JSON: the gate pins the library's algorithms for its whole process.

    Args:
        only_drafts: run only the cases with draft tokens.

    Raises:
        PagespecError: an option is refused.
    """
    config = engine.config
    _check(config)
    from ..compile.load.load import load_model, vocab_size_of
    from ..runner.platform import resolve_device
    from ..verify import CaseGroup, GateSize, run_gate
    from ..verify.cases import MAX_MODEL_LEN

    device = resolve_device(config.device)
    has_own_control = device.type == "cuda" and not only_control
    controls = [CaseGroup(**found) for found in _own_controls()] if has_own_control else []
    model: Any = start.model_of(engine)
    arguments, dtype = config.arguments(), config.dtype
    # The gate's prompts are short, and prefix hits start at interval boundaries.
    arguments["state_interval"] = config.state_interval or config.block_size
    # With several ranks, or weights that no module can hold, each engine loads the model itself.
    quantization = config.quantization
    if config.tensor_parallel_size > 1 or quantization is not None:
        vocab_size = vocab_size_of(model)
    else:
        # Loaded once for all engines, with its dtype and weights.
        loaded = load_model(
            model,
            dtype=dtype,
            device=device,
            load_format=config.load_format,
            max_model_len=MAX_MODEL_LEN,
        )
        vocab_size, quantization = loaded.vocab_size, loaded.quantization
        if quantization is None:
            arguments |= {"dtype": "auto", "load_format": "auto"}
            model = loaded.module
            dtype = str(loaded.dtype).removeprefix("torch.")
        del loaded
    dtype = f"{dtype}, quantization {quantization}" if quantization else dtype

    def make_llm(**overrides: Any) -> Any:
        return start.make_llm(model, **(arguments | overrides))

    size = GateSize.quick() if quick else GateSize(max_batch=config.max_num_seqs)
    began = time.perf_counter()
    with log_shown(logging.WARNING):  # without the progress of each engine's start
        report = run_gate(
            make_llm,
            vocabulary=min(vocab_size, _MAX_VOCABULARY),
            block_size=config.block_size,
            size=dataclasses.replace(size, max_batch=min(size.max_batch, config.max_num_seqs)),
            on_progress=lambda group: note(f"{time.perf_counter() - began:6.1f} s  {group}"),
            with_control=not has_own_control,
            only_control=only_control,
            only_drafts=only_drafts,
        )
    if only_control:
        typer.echo(json.dumps([dataclasses.asdict(group) for group in report.controls]))
        return
    report.controls = controls or report.controls
    where = f"{config.tensor_parallel_size} ranks on " if config.tensor_parallel_size > 1 else ""
    typer.echo(f"{start.model_label(engine)} in {dtype} on {where}{device}")
    typer.echo(_table(report))
    typer.echo(_verdict(report))
    if not report.is_transparent:
        raise typer.Exit(1)


def _check(config: EngineConfig) -> None:
    """Refuse, before loading, options that engines would refuse or that the gate would ignore.

    Raises:
        InvalidInputError: an option is outside its limits, or one that the gate sets itself.
    """
    if config.trace is not None:
        raise InvalidInputError(
            "--trace", config.trace, "must be absent: verify starts several engines"
        )
    if config.speculation is not None:
        raise InvalidInputError(
            "--speculative-config",
            config.speculation.method,
            "must be absent: verify runs cases with and without draft tokens",
        )
    for name in ("max_model_len", "max_num_batched_tokens", "num_blocks", "memory_utilization"):
        given = getattr(config, name)
        if given is not None:
            option = "--" + name.replace("_", "-")
            raise InvalidInputError(option, given, "must be absent: verify sets it for each engine")
    if not config.enable_prefix_caching:
        raise InvalidInputError(
            "--no-prefix-caching", True, "must be absent: verify tests prefix-cache hits"
        )
    from ..verify.report import CUT_PROMPT

    if config.max_num_seqs < 2:
        limit = "must be at least 2: verify runs requests in batches"
        raise InvalidInputError("max_num_seqs", config.max_num_seqs, limit)
    if config.block_size >= CUT_PROMPT:
        limit = f"must be below {CUT_PROMPT}: verify looks for cache hits in prompts of that length"
        raise InvalidInputError("block_size", config.block_size, limit)


def _own_controls() -> list[dict[str, Any]]:
    """The groups of the controls, from a process with the same arguments."""
    command = [sys.executable, "-m", "pagespec.cli", *sys.argv[1:], "--only-control"]
    result = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    if result.returncode != 0:
        raise PagespecError(f"the controls ended with exit code {result.returncode}")
    found: list[dict[str, Any]] = json.loads(result.stdout.strip().splitlines()[-1])
    return found


def _table(report: GateReport) -> str:
    groups = [*report.groups, *report.controls]
    width = max(len(group.name) for group in groups)
    lines = [f"{'schedules':<{width}}  {'cases':>6}  {'equal':>6}  {'different':>9}"]
    for group in groups:
        lines.append(
            f"{group.name:<{width}}  {group.num_cases:>6}  {group.num_equal:>6}  "
            f"{group.num_different:>9}"
        )
    lines += [
        f"first difference in {group.name}: {group.first_difference}"
        for group in report.groups
        if group.first_difference
    ]
    return "\n".join(lines)


def _verdict(report: GateReport) -> str:
    if report.num_different:
        return (
            f"NOT TRANSPARENT: {report.num_different} of {report.num_cases} answers depend on "
            "their schedule."
        )
    if report.idle:
        return (
            f"NOT SHOWN: all {report.num_cases} answers are equal, but there was none of the hits, "
            f"preemptions or draft tokens they are about in: {'; '.join(report.idle)}."
        )
    proven = (
        f"transparent: all {report.num_cases} answers have the tokens and the bits of the logits "
        f"they have alone ({report.num_hit_blocks} cached blocks were used, "
        f"{report.num_preemptions} requests preempted)."
    )
    last = report.controls[-1]
    if report.has_power:
        return (
            f"{proven}\nWithout it {last.num_different} of {last.num_cases} differ "
            f"({last.name.removeprefix('control: ')})."
        )
    return (
        f"{proven}\nThe controls have no power: nothing differs in them either, so these cases "
        "could not have shown a failure."
    )
