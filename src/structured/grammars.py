"""Constraints compiled for one model, and kept: the same schema is compiled once."""

from __future__ import annotations

import json
import threading
from collections import OrderedDict
from collections.abc import Collection
from typing import Any

import numpy as np

from ..engine.structured_outputs import Constraint, StructuredOutputs
from ..errors import InvalidInputError, shortened
from .tokens import make_ll_tokenizer

MAX_KEPT_GRAMMARS = 256
# Of one grammar, shared by its requests: a state of the lexer takes 1 to 2 kB.
_MAX_LEXER_STATES = 50_000
_MAX_REASON = 500


class Grammars:
    """Compiles constraints for one model. Threads may share it.

    Args:
        tokenizer: of the model, or None.
        vocab_size: columns of the logits, which may be more than the tokenizer's tokens.
        eos_token_ids: what may follow a complete text.
    """

    def __init__(self, tokenizer: Any, vocab_size: int, eos_token_ids: Collection[int]) -> None:
        self._model = tokenizer, vocab_size, eos_token_ids
        self.num_words = -(-vocab_size // 32)
        self._ll_tokenizer: Any = None
        self._kept: OrderedDict[Constraint, Any] = OrderedDict()
        self._lock = threading.Lock()

    def check(self, outputs: StructuredOutputs) -> None:
        """Compile a constraint, unless that was done already.

        Raises:
            InvalidInputError: it cannot be kept, or can never be met; or not with this model.
        """
        self._compiled(outputs.constraint)

    def matcher(self, outputs: StructuredOutputs) -> Any:
        """A new ``llguidance.LLMatcher``, at the beginning of the text."""
        return self._compiled(outputs.constraint).deep_copy()

    @property
    def num_ll_words(self) -> int:
        """Words of a mask that llguidance writes: of all tokens it knows."""
        return -(-self._ll_tokenizer.vocab_size // 32)

    def _compiled(self, constraint: Constraint) -> Any:
        with self._lock:
            kept = self._kept.get(constraint)
            if kept is not None:
                self._kept.move_to_end(constraint)
                return kept
            # The first request of a model waits for a second or so, and others with it.
            if self._ll_tokenizer is None:
                self._ll_tokenizer = make_ll_tokenizer(*self._model)
        # The rest takes milliseconds, and threads need not wait for each other.
        made = self._compile(constraint)
        with self._lock:
            self._kept[constraint] = made
            while len(self._kept) > MAX_KEPT_GRAMMARS:
                self._kept.popitem(last=False)
        return made

    def _compile(self, constraint: Constraint) -> Any:
        from llguidance import LLMatcher, LLParserLimits

        field = f"structured_outputs.{constraint.kind}"
        try:
            grammar = _grammar(constraint)
        except Exception as error:  # llguidance converts GBNF in Python
            raise _refusal(field, constraint, str(error)) from error
        limits = LLParserLimits(max_lexer_states=_MAX_LEXER_STATES, verbose_errors=False)
        is_error, messages = LLMatcher.validate_grammar_with_warnings(
            grammar, self._ll_tokenizer, limits=limits
        )
        if is_error or messages:
            raise _refusal(field, constraint, "; ".join(messages))
        matcher = LLMatcher(self._ll_tokenizer, grammar, log_level=0, limits=limits)
        # Some limits, and texts without an end, show in the first mask only.
        mask = np.frombuffer(matcher.compute_bitmask(), np.uint8)
        if matcher.is_error():
            raise _refusal(field, constraint, matcher.get_error())
        if not mask.any():
            raise _refusal(field, constraint, "no text can meet it")
        return matcher


def _grammar(constraint: Constraint) -> str:
    """A constraint in llguidance's own form."""
    from llguidance import LLMatcher, grammar_from

    kind, text, any_whitespace, pattern = constraint
    if kind == "json":
        return LLMatcher.grammar_from_json_schema(
            text,
            overrides={
                "whitespace_flexible": any_whitespace,
                "whitespace_pattern": pattern,
                "lenient": False,
            },
        )
    if kind == "choice":
        return grammar_from("choice", json.dumps(sorted(set(json.loads(text)))))
    return grammar_from("regex" if kind == "regex" else "grammar", text)


def _refusal(field: str, constraint: Constraint, reason: str) -> InvalidInputError:
    return InvalidInputError(
        field, constraint.text, shortened(" ".join(reason.split()), _MAX_REASON)
    )
