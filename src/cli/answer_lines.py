"""Converts input lines to output rows, in order, in one process or in each replica."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

from ..engine.logprob_output import plain_logprobs
from ..errors import InvalidInputError
from .jsonl import Fingerprint, Line, Question, Row, parse_question, row_start
from .make_llm import read_message, sampling_defaults

if TYPE_CHECKING:
    from ..engine.inputs import PromptInput
    from ..engine.outputs import CompletionOutput, RequestOutput
    from ..engine.sampling_params import SamplingParams
    from ..llm import LLM


def answer_lines(llm: LLM, fingerprint: Fingerprint, lines: Iterable[Line]) -> Iterator[Row]:
    """Yield one row per line. A refused line yields a row with ``"error"``.

    Raises:
        EngineError: a step failed.
    """
    defaults = sampling_defaults(llm)
    pulled: deque[tuple[Line, str | int | None]] = deque()  # lines without a row yet, and their ids

    def request(line: Line) -> tuple[Any, SamplingParams] | InvalidInputError:
        identity = None
        try:
            question = parse_question(line)
            identity = question.identity
            prompt = _prompt(llm, question, is_chat=fingerprint.chat)
            params = fingerprint.sampling.params(line.index, question.overrides, defaults)
            return prompt, params
        except InvalidInputError as error:
            return error
        finally:
            pulled.append((line, identity))

    for result in llm.generate_iter(map(request, lines)):
        yield _row(fingerprint, *pulled.popleft(), _columns(result))


def error_row(fingerprint: Fingerprint, line: Line, error: str) -> Row:
    """The row of a line that has no answer for a reason outside the line."""
    try:
        identity = parse_question(line).identity
    except InvalidInputError:
        identity = None
    return _row(fingerprint, line, identity, {"error": error})


def _row(fingerprint: Fingerprint, line: Line, identity: str | int | None, columns: Row) -> Row:
    start = row_start(line, fingerprint.key(line))
    return start | ({} if identity is None else {"id": identity}) | columns


def _prompt(llm: LLM, question: Question, *, is_chat: bool) -> dict[str, Any] | PromptInput:
    if question.kind == "messages":
        prompt = llm.read_messages(question.content)
    elif question.kind == "prompt" and is_chat:
        prompt = read_message(llm, question.content)
    else:
        return {question.kind: question.content, **question.options}
    return llm.reader.marked(prompt, **question.options)


def _columns(result: RequestOutput | Exception) -> Row:
    if isinstance(result, Exception):
        return {"error": str(result)}
    answers = [_fields(answer) for answer in result.outputs]
    columns: Row = answers[0] if len(answers) == 1 else {"outputs": answers}
    columns["num_prompt_tokens"] = len(result.prompt_token_ids)
    if result.prompt_logprobs is not None:
        columns["prompt_logprobs"] = plain_logprobs(result.prompt_logprobs, _finite)
    return columns


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
    """The value; None for infinity, which JSON cannot represent."""
    return value if value is not None and math.isfinite(value) else None
