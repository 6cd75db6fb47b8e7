"""Compiles constraints for one model, and caches them by constraint."""

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

from ..engine.json_schemas import implemented
from ..engine.structural_tags import structural_grammar
from ..engine.structured_config import NO_DEFAULTS, StructuredOutputsConfig
from ..engine.structured_outputs import Constraint, StructuredOutputs
from ..engine.text.reasoning import Reasoning
from ..engine.text.token_bytes import TokenBytes
from ..errors import EngineBusyError, InvalidInputError
from ..threads import start_native
from .gbnf import prepared_gbnf
from .reasoning import ReasoningTokens
from .reasons import readable
from .tokens import make_ll_tokenizer

MAX_KEPT_GRAMMARS = 256
# Copies of an llguidance matcher share a lexer and its lock: masks of 32 rows took as long on 8
# threads as on one. So a popular grammar is compiled up to this many times.
_NUM_LEXERS = 8
# Grammars that compile more slowly than this are compiled only once.
_MAX_COMPILE_AGAIN_S = 0.05
# Limit per lexer, which its requests share: a state takes 1 to 2 kB.
_MAX_LEXER_STATES = 50_000
# Below llguidance's default of a million: nested repeats took 160 MB, which is cached. 350,000 are
# enough for an enum as large as a constraint may be.
_LEXER_FUEL = 400_000
# Limit of llguidance's parser per token of an answer: 5,000 items take it 15 ms. Its default of
# 2,000 is too small for the alternatives of some grammars.
_MAX_ITEMS = 10_000
_NUM_TRIED = 4  # number of first tokens that are tried
# llguidance recurses for each reference and rule: a chain of 3,000 overflowed a stack of 8 MiB and
# ended the process. The longest chain that fits in the largest constraint takes some 90 MiB.
_STACK_BYTES = 256 << 20
_MAX_COMPILING = 4
# A longer compilation continues on its thread, but its request is refused.
_MAX_COMPILE_S = 10.0
# Prefix of a Lark grammar: tokens are selected by their bytes, even where the text is forced.
_NOT_ENCODED = '%llguidance {"no_forcing": true}\n'


@dataclass(slots=True)
class _Compiled:
    """One constraint, compiled by up to :data:`_NUM_LEXERS` of its requests.

    Attributes:
        matchers: matchers at the beginning of the text, each with its own lexer.
        compile_s: duration of the first compilation.
        num_copied: number of copies made so far, from each matcher in turn.
    """

    matchers: list[Any]
    compile_s: float
    num_copied: int = 0


class Grammars:
    """Compiles constraints for one model. Threads may share it.

    Args:
        tokenizer: the model's tokenizer, or None.
        vocab_size: columns of the logits, possibly more than the tokenizer's tokens.
        eos_token_ids: the tokens that may follow a complete text.
        config: defaults of constraints.

    Attributes:
        token_bytes: the bytes of the model's tokens.
        eos_token_ids: as passed, in order.
    """

    def __init__(
        self,
        tokenizer: Any,
        vocab_size: int,
        eos_token_ids: Collection[int],
        config: StructuredOutputsConfig = NO_DEFAULTS,
    ) -> None:
        self._model = tokenizer, vocab_size, eos_token_ids
        self._config = config
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
        """Compile a constraint, unless it was compiled often enough.

        Args:
            reasoning: reasoning that may precede the constrained content.

        Raises:
            InvalidInputError: the constraint cannot be enforced or satisfied, with this model or at
                all, or takes too long to compile.
            EngineBusyError: no compilation thread became free in time.
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
        """The tokens that open or close the reasoning; computed once per form of reasoning."""
        found = self._reasoning_tokens.get(reasoning)
        if found is None:
            backend = self._model[0].backend_tokenizer
            vocab = backend.get_vocab(with_added_tokens=True)
            found = ReasoningTokens(reasoning, backend, vocab, self.token_bytes)
            self._reasoning_tokens[reasoning] = found
        return found

    def is_known(self, outputs: StructuredOutputs) -> bool:
        """Whether a constraint is cached, so that :meth:`check` takes milliseconds."""
        with self._lock:
            return outputs.constraint in self._kept

    def matcher(self, outputs: StructuredOutputs) -> Any:
        """A new ``llguidance.LLMatcher``, at the beginning of the text."""
        # Called by the engine's steps, without a time limit: admission has compiled the constraint.
        made, _ = self._compiled(outputs.constraint, self._compile_now)
        with self._lock:
            one = made.matchers[made.num_copied % len(made.matchers)]
            made.num_copied += 1
        return one.deep_copy()

    @property
    def num_ll_words(self) -> int:
        """Number of 32-bit words of llguidance's masks, over all its tokens."""
        return -(-self._ll_tokenizer.vocab_size // 32)

    def _compiled(
        self, constraint: Constraint, compile: Callable[[Constraint], Any]
    ) -> tuple[_Compiled, bool]:
        """The compiled constraint, and whether this call compiled it."""
        with self._lock:
            kept = self._kept.get(constraint)
            if kept is not None:
                self._kept.move_to_end(constraint)
                return kept, False
            # The first request of a model waits for about a second, and others with it.
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
            grammar = _grammar(self._with_defaults(constraint))
        except InvalidInputError:
            raise
        except Exception as error:  # llguidance converts GBNF in Python
            raise _refusal(constraint, str(error)) from error
        try:
            return self._new_matcher(constraint, grammar, self._ll_tokenizer)
        except InvalidInputError:
            if constraint.kind != "grammar":
                raise
        # Grammars may refer to special tokens by name. Text that spells a name is then not encoded.
        # Without the lock, which the engine's steps take: this takes a second, and may run twice.
        if self._named_tokenizer is None:
            self._named_tokenizer = make_ll_tokenizer(*self._model, has_names=True)
        grammar = _NOT_ENCODED + grammar
        return self._new_matcher(constraint, grammar, self._named_tokenizer)

    def _with_defaults(self, constraint: Constraint) -> Constraint:
        config = self._config
        is_tight = config.disable_any_whitespace and constraint.whitespace_pattern is None
        return constraint._replace(
            any_whitespace=constraint.any_whitespace and not is_tight,
            closes_objects=constraint.closes_objects or config.disable_additional_properties,
        )

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
        # Some limits, and grammars without a finite text, show only in the first mask.
        mask = np.frombuffer(matcher.compute_bitmask(), np.uint8)
        if matcher.is_error():
            raise _refusal(constraint, matcher.get_error())
        if not mask.any():
            raise _refusal(constraint, "no text can satisfy it")
        # Others show only after the first token: too many alternatives.
        for token_id in np.flatnonzero(np.unpackbits(mask, bitorder="little"))[:_NUM_TRIED]:
            tried = matcher.deep_copy()
            if tried.consume_token(int(token_id)) and not tried.is_stopped():
                tried.compute_bitmask()
            if tried.is_error():
                raise _refusal(constraint, tried.get_error())
        return matcher


_starting = threading.Lock()


def _on_deep_stack(work: Callable[[], Any]) -> Future[Any]:
    """Run ``work`` on a thread with ``_STACK_BYTES`` of stack; only the used part takes memory."""
    done: Future[Any] = Future()

    def run() -> None:
        try:
            done.set_result(work())
        except BaseException as error:
            done.set_exception(error)

    with _starting:
        before = threading.stack_size(_STACK_BYTES)
        try:
            start_native(run, "pagespec-grammar")
        finally:
            threading.stack_size(before)
    return done


def _grammar(constraint: Constraint) -> str:
    """A constraint in llguidance's own format."""
    from llguidance import LLMatcher, grammar_from
    from llguidance.gbnf_to_lark import is_lark_syntax

    kind, text, any_whitespace, pattern, closes_objects = constraint
    if kind == "json":
        text = json.dumps(implemented(json.loads(text), closes_objects=closes_objects))
        return LLMatcher.grammar_from_json_schema(
            text,
            overrides={
                "whitespace_flexible": any_whitespace,
                "whitespace_pattern": pattern,
                "lenient": False,
            },
        )
    if kind == "structural_tag":
        return LLMatcher.grammar_from_lark(
            structural_grammar(
                json.loads(text), any_whitespace=any_whitespace, closes_objects=closes_objects
            )
        )
    if kind == "choice":
        # One lexeme, which may have 15,000 alternatives; the parser would try each one separately.
        choices = [json.dumps(choice) for choice in sorted(set(json.loads(text)))]
        return f"start: CHOICE\nCHOICE: {' | '.join(choices)}\n"
    if kind == "regex":
        return grammar_from("regex", text)
    return grammar_from("grammar", text if is_lark_syntax(text) else prepared_gbnf(text))


def _refusal(constraint: Constraint, reason: str, num_lines_before: int = 0) -> InvalidInputError:
    has_place = constraint.kind == "grammar"
    limit = readable(reason, num_lines_before, has_place=has_place)
    return InvalidInputError(f"structured_outputs.{constraint.kind}", constraint.text, limit)
