"""``pagespec chat``: a conversation in the terminal."""

from __future__ import annotations

import contextlib
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import TYPE_CHECKING, Any

import typer

from ..chat.deltas import Delta, ReasoningDelta, ToolCallDelta, message_of
from ..engine.inputs import require_unicode
from ..errors import InvalidInputError
from . import make_llm
from .command import note
from .options import EngineOptions, SamplingOptions

if TYPE_CHECKING:
    from ..llm import LLM

HELP = "/reset clears the conversation, /exit or Ctrl-D quits, Ctrl-C stops an answer."


class StopFlag:
    """Set by Ctrl-C while an answer is streamed."""

    def __init__(self) -> None:
        self.is_set = False


@contextmanager
def ctrl_c_sets() -> Iterator[StopFlag]:
    """While active, the first Ctrl-C sets the flag; a second one interrupts as usual.

    A KeyboardInterrupt inside an engine step would end the answer with an error and empty the
    prefix cache, including the conversation's blocks. The flag is checked between pieces of text.
    """
    flag = StopFlag()

    def on_interrupt(_signal: int, _frame: FrameType | None) -> None:
        if flag.is_set:
            raise KeyboardInterrupt
        flag.is_set = True

    before = signal.signal(signal.SIGINT, on_interrupt)
    try:
        yield flag
    finally:
        signal.signal(signal.SIGINT, before)


class Conversation:
    """The messages of a conversation, and the sampling parameters of the next answer."""

    def __init__(self, llm: LLM, sampling: SamplingOptions, system: str | None) -> None:
        self._llm = llm
        self._sampling, self._defaults = sampling, make_llm.sampling_defaults(llm)
        self._opening: list[dict[str, Any]] = (
            [{"role": "system", "content": system}] if system is not None else []
        )
        self._turn = 0
        self.messages: list[dict[str, Any]] = list(self._opening)

    def reset(self) -> None:
        self.messages = list(self._opening)

    def ask(self, text: str) -> None:
        """Print the answer as it arrives, with dimmed reasoning, and append both messages. A
        stopped answer keeps its text so far.

        Raises:
            InvalidInputError: the conversation is refused (too long, or not Unicode text); it is
                then unchanged.
        """
        require_unicode("message", text)
        messages = [*self.messages, {"role": "user", "content": text}]
        params = self._sampling.params(self._turn, defaults=self._defaults)
        deltas: list[Delta] = []
        stream = self._llm.stream_message(messages, params)
        with contextlib.closing(stream), ctrl_c_sets() as stop:  # type: ignore[type-var]
            for delta in stream:
                _show(delta, deltas[-1] if deltas else None)
                deltas.append(delta)
                if stop.is_set:
                    note(" [stopped]")
                    break
        typer.echo()
        self._turn += 1
        self.messages = [*messages, message_of(deltas)]


def _show(delta: Delta, last: Delta | None) -> None:
    """Print a piece of an answer; reasoning is dimmed and on separate lines."""
    if isinstance(delta, ToolCallDelta):
        return
    if last is not None and type(delta) is not type(last):
        typer.echo("\n")
    is_dim = isinstance(delta, ReasoningDelta)
    typer.echo(typer.style(delta.text, dim=True) if is_dim else delta.text, nl=False)


def talk(engine: EngineOptions, sampling: SamplingOptions, *, system: str | None) -> None:
    """Read and answer messages until the user quits.

    Raises:
        PagespecError: the model is refused or has no chat template.
    """
    sampling.params(0)
    if system is not None:
        require_unicode("--system", system)
    llm = make_llm.start_llm(engine)
    if not llm.chat_reader.has_template:
        limit = "has no chat template; use `pagespec generate --raw --prompt ...`"
        raise InvalidInputError("--model", engine.model, limit)
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401  # editing and history of the input line
    conversation = Conversation(llm, sampling, system)
    note(HELP)
    while (text := _read()) is not None:
        word = text.strip()
        if word == "/exit":
            break
        if word == "/reset":
            conversation.reset()
            note("forgotten")
        elif word.startswith("/"):
            note(f"unknown command {word.split()[0]}; {HELP}")
        elif word:
            try:
                conversation.ask(text)
            except InvalidInputError as error:
                note(f"refused: {error}. /reset starts a new conversation.")


def _read() -> str | None:
    """The next line, or None at the end of input. Ctrl-C discards the line being typed."""
    while True:
        try:
            return input("> ") if sys.stdin.isatty() else _read_piped()
        except UnicodeDecodeError as error:
            note(f"refused: the line is not {error.encoding} text ({error.reason})")
        except EOFError:
            typer.echo()
            return None
        except KeyboardInterrupt:
            note(f"\n{HELP}")


def _read_piped() -> str:
    """The next line of a file or pipe. Each line is decoded separately: at an invalid byte, a text
    stream loses everything that it has read ahead."""
    raw = sys.stdin.buffer.readline()
    if not raw:
        raise EOFError
    return raw.decode(sys.stdin.encoding).rstrip("\r\n")
