"""The known text of a running request: which tokens its matcher has consumed, and when they were
preceded by reasoning."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from ..engine.request import RequestInfo
from ..engine.text.reasoning import Phase, ReasoningTracker
from .reasoning import Ids, ReasoningTokens

_NO_IDS: Ids = np.empty(0, np.int64)


@dataclass(slots=True, eq=False)
class Beginning:
    """A text whose content has not begun.

    Attributes:
        fresh: a matcher at the beginning of the content.
        is_free: whether the row's mask allows all tokens except ``banned`` and, if ``is_early``,
            early stop tokens.
        is_beyond: whether the text so far can only open the reasoning, and cannot be content.
    """

    tracker: ReasoningTracker
    tokens: ReasoningTokens
    fresh: Any
    is_free: bool = False
    banned: int = 0
    is_early: bool = False
    is_beyond: bool = False

    @property
    def is_undecided(self) -> bool:
        return self.tracker.phase is Phase.UNDECIDED


@dataclass(slots=True, eq=False)
class Text:
    """The known text of a running request.

    Attributes:
        mask: index of its mask.
        num_known: number of its known tokens, including the prompt.
        unread: outputs that the matcher has not consumed yet.
        made: done when the matcher has consumed all known tokens and the mask is written.
        failure: why no further mask can be computed.
        beginning: state before the content begins; None from the content's first token on.
        ends: additional tokens that are allowed wherever the model's end tokens are. The matcher
            consumes ``end`` in place of each.
        early_stops: banned before ``min_tokens`` outputs, wherever the mask allows another token.
        num_outputs: number of its known outputs.
        is_fork: see :meth:`fork`.
    """

    matcher: Any
    mask: int
    num_known: int = 0
    unread: list[int] = field(default_factory=list)
    made: Future[None] | None = None
    failure: str = ""
    beginning: Beginning | None = None
    ends: frozenset[int] = frozenset()
    end: int = 0
    early_stops: Ids = field(default_factory=lambda: _NO_IDS)
    min_tokens: int = 0
    num_outputs: int = 0
    is_fork: bool = False

    def fork(self) -> Text:
        """A copy that consumes draft tokens. Called when the matcher has consumed all known
        tokens."""
        matcher, beginning = self.matcher.deep_copy(), self.beginning
        if beginning is not None:
            is_fresh = beginning.fresh is self.matcher
            fresh = matcher if is_fresh else beginning.fresh.deep_copy()
            tracker = copy.copy(beginning.tracker)
            beginning = replace(beginning, tracker=tracker, fresh=fresh)
        return replace(self, matcher=matcher, unread=[], beginning=beginning, is_fork=True)

    @property
    def banned_stops(self) -> Ids:
        """The early stop tokens that are banned now."""
        return self.early_stops if self.num_outputs < self.min_tokens else _NO_IDS

    @property
    def opening(self) -> Ids | None:
        """Tokens that open the reasoning now; None once the content has begun."""
        beginning = self.beginning
        return None if beginning is None else beginning.tokens.opening(beginning.tracker.head)

    def push(self, request: RequestInfo, start: int, token_ids: Sequence[int]) -> None:
        """Add the tokens at positions ``start ..``, some of which may be known already."""
        new = token_ids[self.num_known - start :]
        num_prompt = max(0, request.num_prompt_tokens - self.num_known)
        self.num_known += len(new)
        if len(new) > num_prompt:
            self.push_outputs(new[num_prompt:])

    def push_outputs(self, outputs: Sequence[int]) -> None:
        """Add output tokens, which follow the known ones."""
        self.num_outputs += len(outputs)
        if self.ends:
            outputs = [self.end if i in self.ends else i for i in outputs]
        self.made = None
        num_before = 0
        while self.beginning is not None and num_before < len(outputs):
            self._push_before_content(self.beginning, outputs[num_before])
            num_before += 1
        self.unread += outputs[num_before:]

    def _push_before_content(self, beginning: Beginning, token_id: int) -> None:
        # If the answer turns out to begin with content, the matcher needs its first token too.
        self.unread.append(token_id)
        tracker = beginning.tracker
        phase = tracker.push(token_id)
        if phase is Phase.REASONING or tracker.num_skipped:
            self.unread.clear()
            self.matcher = beginning.fresh
        if phase is Phase.CONTENT:
            self.beginning = None
