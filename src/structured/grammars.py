"""Constraints compiled for one model, and kept: the same schema is compiled once."""

from __future__ import annotations

import json
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Collection
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..engine.structured_outputs import Constraint, StructuredOutputs
from ..engine.text.reasoning import Reasoning
from ..engine.text.token_bytes import TokenBytes
from ..errors import EngineBusyError, InvalidInputError
from .reasoning import ReasoningTokens
from .reasons import readable
from .tokens import make_ll_tokenizer

MAX_KEPT_GRAMMARS = 256
# Copies of an llguidance matcher share a lexer and its lock: masks of 32 rows took as long on 8
# threads as on one. So a popular grammar is compiled up to this often.
_NUM_LEXERS = 8
# Slower grammars are compiled once.
_MAX_COMPILE_AGAIN_S = 0.05
# Per lexer, shared by its requests: a state takes 1 to 2 kB.
_MAX_LEXER_STATES = 50_000
# Less than llguidance's own million: a repeat of repeats took 160 MB, and is kept. 350,000 are
# enough for an enum that is as large as a constraint may be.
_LEXER_FUEL = 400_000
# Of llguidance's parser, per token of an answer: 5,000 take it 15 ms. Its own 2,000 were less than
# the alternatives of some grammars.
_MAX_ITEMS = 10_000
_NUM_TRIED = 4  # first tokens
# llguidance calls itself for each reference and rule: 3,000 in a row ended the process on a stack
# of 8 MiB. The longest that the largest constraint has room for take some 90 MiB.
_STACK_BYTES = 256 << 20
_MAX_COMPILING = 4
# A longer compilation continues on its thread, but no request waits for it.
_MAX_COMPILE_S = 10.0
# Prefix of a Lark grammar: tokens are chosen by their bytes, also where the text is forced.
_NOT_ENCODED = '%llguidance {"no_forcing": true}\n'


@dataclass(slots=True)
class _Compiled:
    """One constraint, compiled once per request, up to :data:`_NUM_LEXERS` times.

    Attributes:
        matchers: at the beginning of the text, with a lexer each.
        compile_s: of the first.
        num_copied: how many copies were made, in turn of each.
    """

    matchers: list[Any]
    compile_s: float
    num_copied: int = 0


class Grammars:
    """Compiles constraints for one model. Threads may share it.

    Args:
        tokenizer: of the model, or None.
        vocab_size: columns of the logits, which may be more than the tokenizer's tokens.
        eos_token_ids: what may follow a complete text.

    Attributes:
        token_bytes: the bytes of the model's tokens.
        eos_token_ids: as given, in order.
    """

    def __init__(self, tokenizer: Any, vocab_size: int, eos_token_ids: Collection[int]) -> None:
        self._model = tokenizer, vocab_size, eos_token_ids
        self.num_words = -(-vocab_size // 32)
        self.token_bytes = TokenBytes(tokenizer)
        self.eos_token_ids = np.array(sorted(eos_token_ids), np.int64)
        self._reasoning_tokens: dict[Reasoning, ReasoningTokens] = {}
        self._ll_tokenizer: Any = None
        self._named_tokenizer: Any = None
        self._kept: OrderedDict[Constraint, _Compiled] = OrderedDict()
        self._lock = threading.Lock()
        self._places = threading.BoundedSemaphore(_MAX_COMPILING)

    def check(self, outputs: StructuredOutputs, reasoning: Reasoning | None = None) -> None:
        """Compile a constraint, unless that was done often enough.

        Args:
            reasoning: that may come before the constrained content.

        Raises:
            InvalidInputError: the constraint cannot be enforced or met, with this model or at all,
                or takes too long to compile.
            EngineBusyError: no place for compiling became free in time.
        """
        constraint = outputs.constraint
        made, is_new = self._compiled(constraint, self._compile_in_time)
        is_wanted = len(made.matchers) < _NUM_LEXERS and made.compile_s < _MAX_COMPILE_AGAIN_S
        if is_wanted and not is_new and self._places.acquire(blocking=False):
            try:
                one_more = self._compile_now(constraint)
            finally:
                self._places.release()
            with self._lock:
                made.matchers.append(one_more)
        if reasoning is not None:
            self.reasoning_tokens(reasoning)

    def reasoning_tokens(self, reasoning: Reasoning) -> ReasoningTokens:
        """The tokens that open or close the reasoning; found once for each of its forms."""
        found = self._reasoning_tokens.get(reasoning)
        if found is None:
            backend = self._model[0].backend_tokenizer
            vocab = backend.get_vocab(with_added_tokens=True)
            found = ReasoningTokens(reasoning, backend, vocab, self.token_bytes)
            self._reasoning_tokens[reasoning] = found
        return found

    def is_known(self, outputs: StructuredOutputs) -> bool:
        """Whether a constraint is kept: :meth:`check` of it takes milliseconds."""
        with self._lock:
            return outputs.constraint in self._kept

    def matcher(self, outputs: StructuredOutputs) -> Any:
        """A new ``llguidance.LLMatcher``, at the beginning of the text."""
        # The engine's steps call this without a time limit: the door has compiled the constraint.
        made, _ = self._compiled(outputs.constraint, self._compile_now)
        with self._lock:
            one = made.matchers[made.num_copied % len(made.matchers)]
            made.num_copied += 1
        return one.deep_copy()

    @property
    def num_ll_words(self) -> int:
        """Words of llguidance's masks: of all its tokens."""
        return -(-self._ll_tokenizer.vocab_size // 32)

    def _compiled(
        self, constraint: Constraint, compile: Callable[[Constraint], Any]
    ) -> tuple[_Compiled, bool]:
        """The compiled constraint, and whether it was compiled by this call."""
        with self._lock:
            kept = self._kept.get(constraint)
            if kept is not None:
                self._kept.move_to_end(constraint)
                return kept, False
            # The first request of a model waits for a second or so, and others with it.
            if self._ll_tokenizer is None:
                self._ll_tokenizer = make_ll_tokenizer(*self._model)
        begin = time.monotonic()
        matcher = compile(constraint)
        made = _Compiled([matcher], time.monotonic() - begin)
        with self._lock:
            self._kept[constraint] = made
            while len(self._kept) > MAX_KEPT_GRAMMARS:
                self._kept.popitem(last=False)
        return made, True

    def _compile_now(self, constraint: Constraint) -> Any:
        return _on_deep_stack(lambda: self._compile(constraint)).result()

    def _compile_in_time(self, constraint: Constraint) -> Any:
        """Compile with a time limit; most constraints take milliseconds."""
        until = time.monotonic() + _MAX_COMPILE_S
        if not self._places.acquire(timeout=_MAX_COMPILE_S):
            raise EngineBusyError("constraints of other requests are being compiled")
        try:
            made = _on_deep_stack(lambda: self._compile(constraint))
        except BaseException as error:
            self._places.release()
            if isinstance(error, RuntimeError):  # no thread can start
                raise EngineBusyError(f"no thread for compiling a constraint: {error}") from error
            raise
        made.add_done_callback(lambda _: self._places.release())
        try:
            return made.result(max(0.1, until - time.monotonic()))
        except TimeoutError:
            raise _refusal(constraint, "takes too long to compile") from None

    def _compile(self, constraint: Constraint) -> Any:
        try:
            grammar = _grammar(constraint)
        except Exception as error:  # llguidance converts GBNF in Python
            raise _refusal(constraint, str(error)) from error
        try:
            return self._new_matcher(constraint, grammar, self._ll_tokenizer)
        except InvalidInputError:
            if constraint.kind != "grammar":
                raise
        # The grammar may refer to special tokens by name. Text that spells one is then not encoded.
        # Without the lock, which steps of the engine take: it takes a second, and two may do it.
        if self._named_tokenizer is None:
            self._named_tokenizer = make_ll_tokenizer(*self._model, has_names=True)
        grammar = _NOT_ENCODED + grammar
        return self._new_matcher(constraint, grammar, self._named_tokenizer)

    @staticmethod
    def _new_matcher(constraint: Constraint, grammar: str, ll_tokenizer: Any) -> Any:
        from llguidance import LLMatcher, LLParserLimits

        limits = LLParserLimits(
            max_items_in_row=_MAX_ITEMS,
            max_lexer_states=_MAX_LEXER_STATES,
            initial_lexer_fuel=_LEXER_FUEL,
            verbose_errors=False,
        )
        is_error, messages = LLMatcher.validate_grammar_with_warnings(
            grammar, ll_tokenizer, limits=limits
        )
        if is_error or messages:
            num_lines = int(grammar.startswith(_NOT_ENCODED))
            raise _refusal(constraint, "; ".join(messages), num_lines)
        matcher = LLMatcher(ll_tokenizer, grammar, log_level=0, limits=limits)
        # Some limits, and texts without an end, show in the first mask only.
        mask = np.frombuffer(matcher.compute_bitmask(), np.uint8)
        if matcher.is_error():
            raise _refusal(constraint, matcher.get_error())
        if not mask.any():
            raise _refusal(constraint, "no text can meet it")
        # Others show behind the first token: too many ways to go on.
        for token_id in np.flatnonzero(np.unpackbits(mask, bitorder="little"))[:_NUM_TRIED]:
            tried = matcher.deep_copy()
            if tried.consume_token(int(token_id)) and not tried.is_stopped():
                tried.compute_bitmask()
            if tried.is_error():
                raise _refusal(constraint, tried.get_error())
        return matcher


_starting = threading.Lock()


def _on_deep_stack(work: Callable[[], Any]) -> Future[Any]:
    """Run ``work`` on a thread with ``_STACK_BYTES``, of which only what is used takes memory."""
    done: Future[Any] = Future()

    def run() -> None:
        try:
            done.set_result(work())
        except BaseException as error:
            done.set_exception(error)

    with _starting:
        before = threading.stack_size(_STACK_BYTES)
        try:
            threading.Thread(target=run, name="pagespec-grammar", daemon=True).start()
        finally:
            threading.stack_size(before)
    return done


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
        # One word for the lexer, which takes 15,000 of them; the parser would try each by itself.
        choices = [json.dumps(choice) for choice in sorted(set(json.loads(text)))]
        return f"start: CHOICE\nCHOICE: {' | '.join(choices)}\n"
    return grammar_from("regex" if kind == "regex" else "grammar", text)


def _refusal(constraint: Constraint, reason: str, num_lines_before: int = 0) -> InvalidInputError:
    has_place = constraint.kind == "grammar"
    limit = readable(reason, num_lines_before, has_place=has_place)
    return InvalidInputError(f"structured_outputs.{constraint.kind}", constraint.text, limit)
