"""Input lines and output rows of a JSONL batch, and the position at which to resume."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from ..engine.inputs import require_unicode
from ..errors import InvalidInputError
from ..params.checks import is_int
from .options import SAMPLING_FIELDS, SamplingOptions

_PROMPT_FIELDS = ("prompt", "prompt_token_ids", "messages")
_PROMPT_OPTIONS = ("cache_salt", "priority", "owner", "prediction")
_BOM = b"\xef\xbb\xbf"

Row = dict[str, Any]
"""One line of the output."""


@dataclass(frozen=True, slots=True)
class Line:
    """One non-blank input line; ``index`` is its line number, from 0. Blank lines are counted but
    have no row, because most JSON Lines files end with one."""

    index: int
    raw: bytes


@dataclass(frozen=True, slots=True)
class Question:
    """A valid line: exactly one of the prompt fields, and the other fields.

    ``options`` are additional entries of the engine's prompt dict.
    """

    kind: str
    content: Any
    identity: str | int | None
    options: dict[str, Any]
    overrides: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """The settings that an answer depends on besides its line; part of every row's key.

    A resumed run compares keys, to detect an output of another input or of other settings.
    """

    model: str
    chat: bool
    sampling: SamplingOptions
    generation_config: str | os.PathLike[str] = "auto"

    def key(self, line: Line) -> str:
        parts = [self.model, self.chat, dict(self.sampling.values), self.generation_config]
        settings = json.dumps(parts, sort_keys=True)
        digest = hashlib.sha256(settings.encode("utf-8", "surrogateescape"))
        digest.update(b"\n" + line.raw)
        return digest.hexdigest()[:16]


@dataclass(frozen=True, slots=True)
class Progress:
    """The progress of an output: number of complete rows, errors among them, their size in bytes,
    and the number of input lines."""

    rows: int
    errors: int
    size: int
    total: int


def read_lines(path: Path) -> Iterator[Line]:
    """The non-blank lines of ``path``, as bytes, so that a bad encoding affects one line only."""
    with path.open("rb") as file:
        for index, raw in enumerate(file):
            stripped = (raw.removeprefix(_BOM) if index == 0 else raw).strip()
            if stripped:
                yield Line(index, stripped)


def parse_question(line: Line) -> Question:
    """Parse a line.

    Raises:
        InvalidInputError: it is not a JSON object, a field is unknown, or it does not have exactly
            one prompt. Other values are checked later.
    """
    shown = line.raw.decode("utf-8", "replace")
    try:
        given = json.loads(
            line.raw.decode("utf-8"),
            object_pairs_hook=_object_without_duplicates,
            parse_constant=_refuse_constant,
        )
    except (ValueError, RecursionError) as error:
        raise InvalidInputError("line", shown, f"must be a JSON object ({error})") from error
    if not isinstance(given, dict):
        raise InvalidInputError("line", shown, "must be a JSON object")
    require_unicode("line", json.dumps(given, ensure_ascii=False))
    known = SAMPLING_FIELDS | {"id", *_PROMPT_OPTIONS, *_PROMPT_FIELDS}
    unknown = sorted(set(given) - known)
    if unknown:
        allowed = ", ".join(sorted(known))
        raise InvalidInputError("field", unknown[0], f"is unknown; the fields are {allowed}")
    kinds = [name for name in _PROMPT_FIELDS if name in given]
    if len(kinds) != 1:
        limit = f"needs exactly one of {', '.join(_PROMPT_FIELDS)}, not {len(kinds)}"
        raise InvalidInputError("line", shown, limit)
    content = given[kinds[0]]
    if not isinstance(content, str if kinds[0] == "prompt" else list):
        limit = {"prompt": "text", "prompt_token_ids": "a list of token ids"}.get(
            kinds[0], "a list"
        )
        raise InvalidInputError(kinds[0], content, f"must be {limit}")
    identity = given.get("id")
    if identity is not None and not (isinstance(identity, str) or is_int(identity)):
        raise InvalidInputError("id", identity, "must be text or an integer")
    overrides = {name: given[name] for name in given if name in SAMPLING_FIELDS}
    options = {name: given[name] for name in _PROMPT_OPTIONS if given.get(name) is not None}
    return Question(kinds[0], content, identity, options, overrides)


def _object_without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    # json silently drops the first of two equal keys.
    found: dict[str, Any] = {}
    for name, value in pairs:
        if name in found:
            raise ValueError(f"{name!r} is given twice")
        found[name] = value
    return found


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


def encode_row(row: Row) -> bytes:
    """A row as one line. Lone surrogates, which JSON allows but UTF-8 does not, are escaped."""
    text = json.dumps(row, ensure_ascii=False) + "\n"
    return text.encode("utf-8", "backslashreplace")


def row_start(line: Line, key: str) -> Row:
    """The first fields of every row, by which ``find_progress`` recognises rows."""
    return {"index": line.index, "key": key}


def find_progress(
    output: BinaryIO, output_name: str, source: Path, fingerprint: Fingerprint
) -> Progress:
    """Compare an output, row by row, with the input that it should belong to. Changes neither.

    A last row without a newline does not count: the run ended while writing it.

    Raises:
        InvalidInputError: the output does not consist of the first rows of this run.
    """
    lines = read_lines(source)
    rows = errors = size = 0
    for raw in output:
        line = next(lines, None)
        if line is None:
            raise _foreign(output_name, rows, f"{source} has only {rows} lines")
        expected = row_start(line, fingerprint.key(line))
        if not raw.endswith(b"\n"):
            _check_partial(raw, expected, output_name, rows)
            return Progress(rows, errors, size, rows + 1 + sum(1 for _ in lines))
        row = _parse_row(raw)
        if row is None or "index" not in row or "key" not in row:
            raise _foreign(output_name, rows, "it is not a row of `pagespec generate`")
        if row["index"] != expected["index"]:
            reason = f"it has index {row['index']!r} instead of {expected['index']}"
            raise _foreign(output_name, rows, reason)
        if row["key"] != expected["key"]:
            reason = f"its line of {source}, model or sampling flags differ from those of this run"
            raise _foreign(output_name, rows, reason)
        rows += 1
        errors += "error" in row
        size += len(raw)
    return Progress(rows, errors, size, rows + sum(1 for _ in lines))


def _parse_row(raw: bytes) -> Row | None:
    try:
        row = json.loads(raw)
    except (ValueError, RecursionError):
        return None
    return row if isinstance(row, dict) else None


def _check_partial(raw: bytes, expected: dict[str, Any], name: str, rows: int) -> None:
    # Truncating an unrelated file would destroy a user's data.
    start = encode_row(expected).rstrip(b"}\n")
    length = min(len(raw), len(start))
    if raw[:length] != start[:length]:
        raise _foreign(name, rows, "it is not a row of this run")


def _foreign(name: str, rows: int, reason: str) -> InvalidInputError:
    limit = (
        f"row {rows + 1} does not belong to this run: {reason}. "
        "Choose another --output, or pass --overwrite to start again"
    )
    return InvalidInputError("--output", name, limit)
