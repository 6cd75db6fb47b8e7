"""Log-probabilities of an output, in two forms: a list of dicts, and flat lists."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, MutableSequence, Sequence
from dataclasses import dataclass, field
from functools import wraps
from typing import Any, overload

from .logprobs import KeptRows


@dataclass(slots=True)
class Logprob:
    """The log-probability of a token at a position.

    Attributes:
        logprob: natural logarithm, as a float32 value; NaN if the model's logits have no finite
            maximum.
        rank: 1 plus the number of tokens that precede it in descending order of logits (ties: by
            ascending id). Ranks are therefore distinct, and a greedy token has rank 1.
        decoded_token: its text as inside a text, U+FFFD for bytes that form no character; None if
            the model has no tokenizer, or with ``detokenize=False``.
    """

    logprob: float
    rank: int | None = None
    decoded_token: str | None = None


LogprobsOnePosition = dict[int, Logprob]
"""By token id: the position's own token first, then the most likely tokens."""


class LogprobPositions:
    """The log-probabilities of some tokens, as kept rows.

    Args:
        token_ids: the tokens.
        kept: their rows; the first is at ``begin``.
        num_top: number of most likely tokens per position.
        decode: decodes one token; None: entries have no text.
        has_first: a position without row comes before them: the first token of a prompt.
        given_ids: tokens whose rows are behind the row of each position.
    """

    __slots__ = (
        *("_decode", "_given_ids", "_has_first", "_num_top", "_places", "_rows", "_token_ids"),
    )

    def __init__(
        self,
        token_ids: Sequence[int],
        kept: KeptRows,
        num_top: int,
        decode: Callable[[int], str] | None,
        *,
        begin: int = 0,
        has_first: bool = False,
        given_ids: Sequence[int] = (),
    ) -> None:
        self._given_ids = given_ids
        self._token_ids, self._num_top, self._decode = token_ids, num_top, decode
        end = begin + len(token_ids)
        self._rows, self._places = kept.rows[begin:end], kept.places[begin:end]
        self._has_first = has_first
        if len(self._places) != len(token_ids):
            raise RuntimeError(f"{len(self._places)} rows for {len(token_ids)} tokens")

    def __len__(self) -> int:
        return self._has_first + len(self._token_ids)

    def __iter__(self) -> Iterator[list[tuple[int, float, int, str | None]] | None]:
        """Per position (token id, log-probability, rank, text) of its own token, then of the other
        most likely or given tokens; None for the first token of a prompt."""
        if self._has_first:
            yield None
        text: Callable[[int], str | None] = self._decode or (lambda _: None)
        for token_id, rows, place in zip(self._token_ids, self._rows, self._places, strict=True):
            logprob, rank, top_ids, top = rows.row(place, self._num_top)
            entries: list[tuple[int, float, int, str | None]]
            entries = [(token_id, logprob, rank, text(token_id))]
            for top_rank, (top_id, value) in enumerate(zip(top_ids, top, strict=True), 1):
                if top_id != token_id:
                    entries.append((top_id, value, top_rank, text(top_id)))
            for number, given in enumerate(self._given_ids, 1):
                if given != token_id:
                    logprob, rank, *_ = rows.row(place + number, 0)
                    entries.append((given, logprob, rank, text(given)))
            yield entries

    def dicts(self) -> list[Any]:
        """A dict per position; None for the first token of a prompt."""
        return [
            None
            if entries is None
            else {i: Logprob(value, rank, text) for i, value, rank, text in entries}
            for entries in self
        ]

    def flat(self) -> FlatLogprobs:
        """All positions in flat lists; the first token of a prompt has no entries."""
        made = FlatLogprobs()
        for entries in self:
            made.append_fast(*(zip(*entries, strict=True) if entries else ((), (), (), ())))
        return made


class LogprobList(list[Any]):
    """A list of dicts that is filled on first access, by any method of ``list``.

    Creating hundreds of thousands of dicts eagerly would keep Python's garbage collector busy while
    the device waits. Copies and pickles are plain lists. C extensions that read a list's memory
    directly, instead of calling its methods, find it empty before the first access.
    """

    __slots__ = ("_positions",)

    def __init__(self, positions: LogprobPositions) -> None:
        super().__init__()
        self._positions: LogprobPositions | None = positions

    def __len__(self) -> int:
        return super().__len__() if self._positions is None else len(self._positions)

    def __radd__(self, before: list[Any]) -> list[Any]:
        return before + self[:] if isinstance(before, list) else NotImplemented

    def __reduce_ex__(self, _protocol: Any) -> tuple[Any, ...]:
        return list, (self[:],)

    def fill(self) -> None:
        """Create the dicts, unless they exist."""
        if self._positions is not None:
            made = self._positions.dicts()
            list.__setitem__(self, slice(None), made)
            self._positions = None


def _filling(method: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(method)
    def run(self: LogprobList, *given: Any, **named: Any) -> Any:
        for one in (self, *given):
            if isinstance(one, LogprobList):
                one.fill()
        return method(self, *given, **named)

    return run


_PLAIN = ("__new__", "__init__", "__getattribute__", "__class_getitem__", "__len__")
for _name, _method in vars(list).items():
    if callable(_method) and _name not in _PLAIN:
        setattr(LogprobList, _name, _filling(_method))


@dataclass
class FlatLogprobs(MutableSequence[Any]):
    """Log-probabilities of all positions in six flat lists, which Python's garbage collector need
    not scan per position. Fields and methods are those of vLLM's class.

    As a sequence it has a new dict per position, and can only grow: ``append`` and ``extend``.

    Attributes:
        start_indices, end_indices: per position, the range of its entries in the other lists.
        token_ids, logprobs, ranks, decoded_tokens: the entries, see :class:`Logprob`.
    """

    start_indices: list[int] = field(default_factory=list)
    end_indices: list[int] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    ranks: list[int | None] = field(default_factory=list)
    decoded_tokens: list[str | None] = field(default_factory=list)

    def append(self, value: Mapping[int, Logprob] | None) -> None:
        """Add a position; None: one without entries."""
        entries = (value or {}).values()
        self.append_fast(
            value or (),
            (entry.logprob for entry in entries),
            (entry.rank for entry in entries),
            (entry.decoded_token for entry in entries),
        )

    def append_fast(
        self,
        token_ids: Iterable[int],
        logprobs: Iterable[float],
        ranks: Iterable[int | None],
        decoded_tokens: Iterable[str | None],
    ) -> None:
        """Add a position from the columns of its entries; the shortest column counts."""
        self.start_indices.append(len(self.token_ids))
        for entry in zip(token_ids, logprobs, ranks, decoded_tokens, strict=False):
            for column, value in zip(self._columns(), entry, strict=True):
                column.append(value)
        self.end_indices.append(len(self.token_ids))

    def _columns(self) -> tuple[list[Any], ...]:
        return self.token_ids, self.logprobs, self.ranks, self.decoded_tokens

    def __len__(self) -> int:
        return len(self.start_indices)

    @overload
    def __getitem__(self, index: int) -> LogprobsOnePosition: ...

    @overload
    def __getitem__(self, index: slice) -> FlatLogprobs: ...

    def __getitem__(self, index: int | slice) -> LogprobsOnePosition | FlatLogprobs:
        if isinstance(index, slice):
            part = FlatLogprobs()
            for place in range(*index.indices(len(self))):
                part.append_fast(*self._entries(place))
            return part
        ids, *rest = self._entries(index)
        return {i: Logprob(*entry) for i, *entry in zip(ids, *rest, strict=True)}

    def _entries(self, place: int) -> list[list[Any]]:
        begin, end = self.start_indices[place], self.end_indices[place]
        return [column[begin:end] for column in self._columns()]

    def __setitem__(self, index: Any, value: Any) -> None:
        raise TypeError("FlatLogprobs can only grow: append or extend")

    def __delitem__(self, index: Any) -> None:
        raise TypeError("FlatLogprobs can only grow: append or extend")

    def insert(self, index: int, value: Any) -> None:  # noqa: ARG002
        """Refused: raises TypeError."""
        raise TypeError("FlatLogprobs can only grow: append or extend")


SampleLogprobs = list[LogprobsOnePosition] | FlatLogprobs
PromptLogprobs = list[LogprobsOnePosition | None] | FlatLogprobs


def create_sample_logprobs(flat_logprobs: bool) -> SampleLogprobs:
    """An empty container of log-probabilities. Name and argument as in vLLM."""
    return FlatLogprobs() if flat_logprobs else []


def create_prompt_logprobs(flat_logprobs: bool) -> PromptLogprobs:
    """A container with a prompt's first token, which has none. Name and argument as in vLLM."""
    made: PromptLogprobs = FlatLogprobs() if flat_logprobs else []
    made.append(None)
    return made


def append_logprobs_for_next_position(
    request_logprobs: SampleLogprobs | PromptLogprobs,
    token_ids: Sequence[int],
    logprobs: Sequence[float],
    decoded_tokens: Iterable[str | None],
    rank: int,
    num_logprobs: int,
) -> None:
    """Add a position: its own token with ``rank``, then tokens of ranks 1, 2, ... Name and
    arguments as in vLLM.

    Args:
        num_logprobs: number of tokens after the own one; -1: all.
    """
    num_top = len(logprobs) if num_logprobs == -1 else num_logprobs
    ranks = [rank, *range(1, num_top + 1)]
    if isinstance(request_logprobs, FlatLogprobs):
        request_logprobs.append_fast(token_ids, logprobs, ranks, decoded_tokens)
        return
    entries = zip(token_ids, logprobs, ranks, decoded_tokens, strict=False)
    request_logprobs.append({i: Logprob(*entry) for i, *entry in entries})
