"""Lines in, output rows out, in order: what the one process runs, and each replica."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ..errors import InvalidInputError, PagespecError
from .jsonl import Fingerprint, Line, Question, Row, parse_question, row_start
from .logprob_columns import answer_columns, prompt_columns
from .make_llm import sampling_defaults
from .prompts import conversation_prompt, user_message

if TYPE_CHECKING:
    from ..engine.inputs import PromptInput
    from ..engine.outputs import CompletionOutput
    from ..engine.sampling_params import SamplingParams
    from ..llm import LLM


def answer_lines(llm: LLM, fingerprint: Fingerprint, lines: Iterable[Line]) -> Iterator[Row]:
    """Yield one row per line. A line that is refused yields a row with ``"error"``.

    Raises:
        EngineError: a step failed.
    """
    return _Answering(llm, fingerprint).answer(lines)


def error_row(fingerprint: Fingerprint, line: Line, error: str) -> Row:
    """The row of a line that has no answer, for a reason outside of the line."""
    try:
        identity = parse_question(line).identity
    except InvalidInputError:
        identity = None
    return _row(_Job(line, identity), fingerprint, {"error": error})


@dataclass(slots=True)
class _Job:
    """A line on its way: either it went to the engine, or its error row waits for its turn."""

    line: Line
    identity: str | int | None = None
    error: str | None = None


def _row(job: _Job, fingerprint: Fingerprint, fields: Row) -> Row:
    row = row_start(job.line, fingerprint.key(job.line))
    if job.identity is not None:
        row["id"] = job.identity
    return row | fields


def _fields(answer: CompletionOutput) -> Row:
    return {
        "text": answer.text,
        "finish_reason": answer.finish_reason,
        "token_ids": list(answer.token_ids),
        **answer_columns(answer),
    }


class _Answering:
    """Lines that were pulled and have no row yet.

    The engine gives results in the order in which it pulled requests, but a line that cannot be
    read never reaches it. ``_pending`` holds all lines pulled and not yet answered, so that an
    error row comes between its neighbours and not before them.
    """

    def __init__(self, llm: LLM, fingerprint: Fingerprint) -> None:
        self._llm, self._defaults = llm, sampling_defaults(llm)
        self._fingerprint = fingerprint
        self._pending: deque[_Job] = deque()

    def answer(self, lines: Iterable[Line]) -> Iterator[Row]:
        for result in self._llm.generate_iter(self._requests(lines)):
            yield from self._errors()
            job = self._pending.popleft()
            if isinstance(result, Exception):
                yield _row(job, self._fingerprint, {"error": str(result)})
            else:
                answers = [_fields(answer) for answer in result.outputs]
                fields: Row = answers[0] if len(answers) == 1 else {"outputs": answers}
                fields["num_prompt_tokens"] = len(result.prompt_token_ids)
                yield _row(job, self._fingerprint, fields | prompt_columns(result))
        yield from self._errors()
        if self._pending:
            raise PagespecError(f"the engine left {len(self._pending)} lines unanswered")

    def _requests(self, lines: Iterable[Line]) -> Iterator[tuple[Any, SamplingParams]]:
        for line in lines:
            job = _Job(line)
            self._pending.append(job)
            try:
                question = parse_question(line)
                job.identity = question.identity
                prompt = self._prompt(question)
                sampling = self._fingerprint.sampling
                params = sampling.params(line.index, question.overrides, self._defaults)
            except InvalidInputError as error:
                job.error = str(error)
            else:
                yield prompt, params

    def _prompt(self, question: Question) -> dict[str, Any] | PromptInput:
        if question.kind == "messages":
            return conversation_prompt(self._llm, question.content, **question.options)
        if question.kind == "prompt" and self._fingerprint.chat:
            messages = user_message(question.content)
            return conversation_prompt(self._llm, messages, **question.options)
        return {question.kind: question.content, **question.options}

    def _errors(self) -> Iterator[Row]:
        """The error rows that are next in line."""
        while self._pending and self._pending[0].error is not None:
            job = self._pending.popleft()
            yield _row(job, self._fingerprint, {"error": job.error})
