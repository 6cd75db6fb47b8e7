"""Edits of a request's logits before sampling, with parameters resolved to token ids."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from ..errors import InvalidInputError
from .edit_checks import MAX_BAD_WORDS
from .sampling_params import SamplingParams


@dataclass(frozen=True, slots=True, eq=False)
class LogitEdits:
    """The edits of one request, resolved for its model; immutable.

    Attributes:
        repetition_penalty, presence_penalty, frequency_penalty: as in ``SamplingParams``.
        bias: (token id, added value), sorted by id.
        allowed: the ids that can be sampled, sorted; None: all.
        bad_words: sequences of ids; the last id is banned right after the others were generated.
        min_tokens: output length from which ``stop_token_ids`` can be sampled.
        processors: functions of (output ids, row of logits).
    """

    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    bias: tuple[tuple[int, float], ...] = ()
    allowed: tuple[int, ...] | None = None
    bad_words: tuple[tuple[int, ...], ...] = ()
    min_tokens: int = 0
    stop_token_ids: tuple[int, ...] = ()
    processors: tuple[Callable[..., Any], ...] = ()

    @classmethod
    def of(
        cls,
        params: SamplingParams,
        stop_token_ids: Iterable[int] = (),
        bad_words: Sequence[tuple[int, ...]] = (),
        processors: Sequence[Callable[..., Any]] = (),
    ) -> LogitEdits | None:
        """Resolve the edits of ``params``.

        Args:
            stop_token_ids: the tokens that ``min_tokens`` bans.
            bad_words: the ``bad_words`` of ``params``, as token ids.
            processors: run after the ``logits_processors`` of ``params``.

        Returns:
            None if ``params`` edit nothing.

        Raises:
            InvalidInputError: no token is left to sample.
        """
        # For constrained requests, bitmasks ban these: a complete text may allow nothing else.
        has_stops = params.min_tokens > 0 and params.structured_outputs is None
        stops = tuple(sorted(stop_token_ids)) if has_stops else ()
        allowed = params.allowed_token_ids
        edits = cls(
            params.repetition_penalty,
            params.presence_penalty,
            params.frequency_penalty,
            tuple(sorted((params.logit_bias or {}).items())),
            None if allowed is None else tuple(sorted(set(allowed))),
            tuple(dict.fromkeys(map(tuple, bad_words))),
            params.min_tokens if stops else 0,
            stops,
            (*(params.logits_processors or ()), *processors),
        )
        banned = {word[0] for word in edits.bad_words if len(word) == 1}
        if edits.allowed is not None and not set(edits.allowed) - banned - set(stops):
            limit = "leaves nothing to sample once bad_words and min_tokens ban their tokens"
            raise InvalidInputError("allowed_token_ids", list(edits.allowed), limit)
        return edits if edits.is_active(0) else None

    @property
    def has_penalties(self) -> bool:
        return (self.repetition_penalty, self.presence_penalty, self.frequency_penalty) != (1, 0, 0)

    @property
    def needs_history(self) -> bool:
        """Whether the edits depend on earlier tokens."""
        has_prefixes = any(len(word) > 1 for word in self.bad_words)
        return self.has_penalties or has_prefixes or bool(self.processors)

    @property
    def is_lasting(self) -> bool:
        """Whether there are edits besides ``min_tokens``."""
        is_restricted = self.allowed is not None or bool(self.bad_words)
        return self.has_penalties or is_restricted or bool(self.bias or self.processors)

    def bans(self, token_id: int, output_token_ids: Sequence[int]) -> bool:
        """Whether a token cannot be sampled after an output; ``processors`` are not called."""
        num_tokens = len(output_token_ids)
        if self.allowed is not None and token_id not in self.allowed:
            return True
        if num_tokens < self.min_tokens and token_id in self.stop_token_ids:
            return True
        for *before, last in self.bad_words:
            begin = num_tokens - len(before)
            if last == token_id and begin >= 0 and list(output_token_ids[begin:]) == before:
                return True
        return False

    def is_active(self, num_output_tokens: int) -> bool:
        """Whether the token after ``num_output_tokens`` outputs has an edit."""
        return self.is_lasting or num_output_tokens < self.min_tokens


def bad_word_ids(
    encode: Callable[[str], Sequence[int]], bad_words: Sequence[str]
) -> list[tuple[int, ...]]:
    """The token ids of words at the beginning of a text, and after a space if those differ in the
    first token only (as in vLLM).

    Args:
        encode: returns a text's token ids without special tokens.

    Raises:
        InvalidInputError: a word has no tokens, or there are too many sequences.
    """
    found: list[tuple[int, ...]] = []
    for word in bad_words:
        plain, spaced = (tuple(encode(prefix + word.lstrip())) for prefix in ("", " "))
        if not plain:
            raise InvalidInputError("bad_words", word, "has no tokens")
        found.append(plain)
        if spaced and spaced[0] != plain[0] and len(spaced) == len(plain):
            found.append(spaced)
    if len(found) > MAX_BAD_WORDS:
        limit = f"are {len(found)} sequences of tokens; at most {MAX_BAD_WORDS}"
        raise InvalidInputError("bad_words", list(bad_words), limit)
    return found
