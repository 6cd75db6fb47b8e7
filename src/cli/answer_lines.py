"""Converts input lines to output rows, in order, in one process or in each replica."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ..engine.logprob_output import plain_logprobs
from ..errors import InvalidInputError, PagespecError
from .jsonl import Fingerprint, Line, Question, Row, parse_question, row_start
from .make_llm import read_message, sampling_defaults

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
    """The row of a line without an answer, for a reason outside the line."""
    try:
        identity = parse_question(line).identity
    except InvalidInputError:
        identity = None
    return _row(_Job(line, identity), fingerprint, {"error": error})


@dataclass(slots=True)
class _Job:
    """A pending line: either the engine has it, or its error row waits for its turn."""

    line: Line
    identity: str | int | None = None
    error: str | None = None


def _row(job: _Job, fingerprint: Fingerprint, fields: Row) -> Row:
    row = row_start(job.line, fingerprint.key(job.line))
    if job.identity is not None:
        row["id"] = job.identity
    return row | fields


def _fields(answer: CompletionOutput) -> Row:
    fields: Row = {
        "text": answer.text,
        "finish_reason": answer.finish_reason,
        "token_ids": list(answer.token_ids),
    }
    if answer.logprobs is not None:
        fields["cumulative_logprob"] = _finite(answer.cumulative_logprob)
        fields["logprobs"] = plain_logprobs(answer.logprobs, _finite)
    return fields


def _finite(value: float | None) -> float | None:
    """JSON has no infinity: None stands for it."""
    return value if value is not None and math.isfinite(value) else None


class _Answering:
    """Pulled lines without a row.

    The engine gives results in the order of requests, but an invalid line never reaches it.
    ``_pending`` holds all lines without a row, so that error rows keep their place.
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
                if result.prompt_logprobs is not None:
                    fields["prompt_logprobs"] = plain_logprobs(result.prompt_logprobs, _finite)
                yield _row(job, self._fingerprint, fields)
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
            prompt = self._llm.read_messages(question.content)
        elif question.kind == "prompt" and self._fingerprint.chat:
            prompt = read_message(self._llm, question.content)
        else:
            return {question.kind: question.content, **question.options}
        return self._llm.reader.marked(prompt, **question.options)

    def _errors(self) -> Iterator[Row]:
        """The error rows that are next in line."""
        while self._pending and self._pending[0].error is not None:
            job = self._pending.popleft()
            yield _row(job, self._fingerprint, {"error": job.error})
