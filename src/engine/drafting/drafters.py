"""Drafters: they look up the latest tokens in what was written before, or keep what the runner
drafted with a second model.

``ngram`` looks in the request's own prompt and output. ``suffix`` also looks in earlier answers,
among requests of the same cache salt. A request with a ``prediction`` of its answer is drafted from
it first, with each method; ``prediction`` drafts from nothing else.

Proposals depend on settled tokens, on counts of accepted draft tokens and on the table of step
costs. No output depends on proposals (S58).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from ..request import Request
from ..runner import DraftObserver
from .config import MODEL_METHODS, SpeculativeConfig
from .costs import DEFAULT_COSTS, StepCosts
from .mode import Acceptance, DraftMode
from .token_index import MAX_PLACES, TokenIndex, continued, longest, match_length

_MAX_MATCH = 32  # tokens of context that "suffix" compares
_KEY = 2  # tokens in the keys of the indices of "suffix" and of predictions
_LEAST_SHARE = 0.4  # of the earlier places, which agree with all of the draft
_MAX_CORPUS_TOKENS = 1 << 17
_MAX_ANSWER_TOKENS = 4096
_LONG_ROW = 32  # tokens; more than any row has behind its prompt, unless it was preempted


class _Prediction:
    """A predicted answer and the place in it that the output has reached.

    The place moves with each output token that is equal. After a different one it is found again by
    the latest tokens of the output.
    """

    __slots__ = ("_index", "_is_lost", "_num_seen", "_place", "_tokens")

    def __init__(self, tokens: Sequence[int]) -> None:
        self._tokens = tokens
        self._index = TokenIndex(_KEY)
        self._place, self._num_seen, self._is_lost = 0, 0, False

    def propose(self, request: Request, most: int) -> Sequence[int]:
        tokens, known = self._tokens, request.token_ids
        begin = request.num_prompt_tokens
        for position in range(begin + self._num_seen, len(known)):
            place = self._place
            self._is_lost |= place >= len(tokens) or tokens[place] != known[position]
            if self._is_lost:
                break
            self._place += 1
        self._num_seen = len(known) - begin
        if self._is_lost:
            self._find_again(known[max(begin, len(known) - _MAX_MATCH) :])
        return () if self._is_lost else tokens[self._place : self._place + most]

    def _find_again(self, context: Sequence[int]) -> None:
        """Go to the place with the longest match, preferably the next one after the old place."""
        if not self._index.extend(self._tokens):
            return
        places = self._index.places(context, len(self._tokens))
        _, found = longest(self._tokens, places, context, _KEY, _MAX_MATCH)
        if found:
            self._place = min((p for p in found if p >= self._place), default=found[0])
            self._is_lost = False


def is_long_row(request: Request) -> bool:
    """Whether a planned row has so many tokens of its own, most of them of a prompt, that it has no
    draft tokens. Steps with prompts are padded to sizes far apart: a few tokens more could double
    their time, and save one short step."""
    return request.num_dispatched - request.num_computed > _LONG_ROW


class RequestDrafts(Acceptance):
    """The state of one request: its index, its prediction and its acceptance.

    Attributes:
        index: of its tokens.
        prediction: None if it has none.
        is_predicted: whether its latest proposal was from its prediction.
        offered: its number of tokens when the runner last drafted for it, and these tokens.
    """

    __slots__ = ("index", "is_predicted", "offered", "prediction")

    def __init__(self, request: Request, key_length: int, rate: float, share: float) -> None:
        super().__init__(request.num_prompt_tokens, rate, share)
        self.index = TokenIndex(key_length)
        self.prediction = _Prediction(request.prediction) if request.prediction else None
        self.is_predicted = False
        self.offered: tuple[int, Sequence[int]] = (-1, ())


class PredictionDrafter(DraftObserver):
    """Drafts from predictions only; the base of the other methods.

    The number of draft tokens per row follows from :class:`.DraftMode`.

    Args:
        config: the argument of the engine.
        costs: durations of steps.
    """

    def __init__(self, config: SpeculativeConfig, costs: StepCosts = DEFAULT_COSTS) -> None:
        self.max_draft_tokens = config.num_speculative_tokens
        self._config = config
        self._key_length = _KEY
        self.mode = DraftMode(self.max_draft_tokens, costs, self._state_of, self._found)

    @property
    def num_if_right(self) -> int:
        """See :attr:`.DraftMode.num_if_right`."""
        return self.mode.num_if_right

    def serves(self, request: Request) -> bool:
        """Whether a request may have draft tokens."""
        return self._config.serves(request.prediction)

    def wants_drafts(self, running: Sequence[Request], num_others: int) -> bool:
        return self.mode.wants_drafts(running, num_others)

    def begin(self, requests: Sequence[Request], num_tokens: int, is_settled: bool) -> None:
        self.mode.begin(requests, num_tokens, is_settled)

    def propose(self, request: Request) -> Sequence[int]:
        drafts = self._state_of(request)
        if drafts is None or is_long_row(request):
            return ()
        most = self.mode.number(request, drafts)
        if not most:
            return ()
        found = self._found(request, most)
        drafts.note_proposal(len(found) > 0)
        if found:
            drafts.end, drafts.watched = len(request.token_ids), ()
        return found

    def _state_of(self, request: Request) -> RequestDrafts | None:
        drafts = request.drafts
        if isinstance(drafts, RequestDrafts):
            return drafts
        if not self._config.serves(request.prediction):
            return None
        share = 1.0 if request.prediction else self.mode.first_share
        drafts = RequestDrafts(request, self._key_length, self.mode.first_rate, share)
        request.drafts = drafts
        return drafts

    def _found(self, request: Request, most: int) -> Sequence[int]:
        """At most ``most`` draft tokens, up to the first one that would end the request: a sample
        after it would be discarded."""
        drafts = self._state_of(request)
        if drafts is None:
            return ()
        found: Sequence[int] = ()
        if drafts.prediction is not None:
            found = drafts.prediction.propose(request, most)
        drafts.is_predicted = bool(found)
        if not found:
            found = self._continuation(request, drafts, most)
        ends = request.stop_token_ids
        if not ends.isdisjoint(found):
            found = found[: next(i for i, token in enumerate(found) if token in ends)]
        return found

    def _continuation(
        self,
        request: Request,  # noqa: ARG002
        drafts: RequestDrafts,  # noqa: ARG002
        most: int,  # noqa: ARG002
    ) -> Sequence[int]:
        """At most ``most`` draft tokens that are not from a prediction."""
        return ()

    def note(self, request: Request, num_drafts: int, num_accepted: int) -> None:
        drafts = request.drafts
        if isinstance(drafts, RequestDrafts):
            drafts.note(num_drafts, num_accepted)
            self.mode.note(num_drafts, num_accepted)
            if drafts.is_predicted:
                request.num_predicted += num_drafts
                request.num_accepted_predicted += num_accepted

    def end(self, request: Request) -> None:
        if isinstance(request.drafts, RequestDrafts):
            self.mode.note_end(request.drafts)

    def reset(self) -> None:
        self.mode.reset()


class NgramDrafter(PredictionDrafter):
    """Proposes what followed the latest tokens when they last occurred in the request: the longest
    match of ``prompt_lookup_min`` to ``prompt_lookup_max`` tokens, and the latest of these."""

    def __init__(self, config: SpeculativeConfig, costs: StepCosts = DEFAULT_COSTS) -> None:
        super().__init__(config, costs)
        self._key_length, self._max_length = config.prompt_lookup_min, config.prompt_lookup_max

    def _continuation(self, request: Request, drafts: RequestDrafts, most: int) -> Sequence[int]:
        tokens = request.token_ids
        if not drafts.index.extend(tokens):
            return ()
        places = drafts.index.places(tokens, len(tokens))
        best, best_length = 0, self._key_length - 1
        for place in places:
            length = match_length(tokens, place, tokens, self._max_length)
            if length > best_length:
                best, best_length = place, length
                if length == self._max_length:
                    break
        return continued(tokens, best, most) if best else ()


class _Corpus:
    """Earlier answers of all salts, up to a number of tokens. The answers that were used least
    recently are dropped first."""

    def __init__(self, max_num_tokens: int) -> None:
        self._max_num_tokens = max_num_tokens
        self.num_tokens = 0
        self._number = 0
        self._answers: OrderedDict[int, tuple[bytes, list[int]]] = OrderedDict()
        # Per salt and n-gram, the places: (number of the answer, index behind the n-gram).
        self._places: dict[bytes, dict[int, list[tuple[int, int]]]] = {}

    def __len__(self) -> int:
        return len(self._answers)

    def add(self, salt: bytes, answer: list[int]) -> None:
        if len(answer) <= _KEY:
            return
        number = self._number = self._number + 1
        self._answers[number] = salt, answer
        self.num_tokens += len(answer)
        places = self._places.setdefault(salt, {})
        for end in range(_KEY, len(answer)):
            there = places.setdefault(hash(tuple(answer[end - _KEY : end])), [])
            there.append((number, end))
            if len(there) > MAX_PLACES:
                del there[0]
        while self.num_tokens > self._max_num_tokens:
            self._drop()

    def _drop(self) -> None:
        number, (salt, answer) = self._answers.popitem(last=False)
        self.num_tokens -= len(answer)
        places = self._places[salt]
        for end in range(_KEY, len(answer)):
            key = hash(tuple(answer[end - _KEY : end]))
            kept = [place for place in places.get(key, ()) if place[0] != number]
            if kept:
                places[key] = kept
            else:
                places.pop(key, None)
        if not places:
            del self._places[salt]

    def find(
        self, salt: bytes, context: Sequence[int], least: int
    ) -> tuple[int, list[tuple[Sequence[int], int]]]:
        """The length of the longest match, and all places that have it, newest first. Nothing is
        found below ``least`` tokens."""
        places = self._places.get(salt)
        if places is None:
            return least, []
        best, found = least, []
        for number, place in reversed(places.get(hash(tuple(context[-_KEY:])), ())):
            answer = self._answers[number][1]
            length = match_length(answer, place, context, _MAX_MATCH)
            if length > best:
                best, found = length, [(number, place)]
            elif length == best:
                found.append((number, place))
        for number, _ in found:
            self._answers.move_to_end(number)
        return best, [(self._answers[number][1], place) for number, place in found]


class SuffixDrafter(PredictionDrafter):
    """Proposes the most frequent continuation of the longest match, in the request's own tokens and
    in earlier answers of the same salt. A draft ends where too few of the places agree with it."""

    def __init__(
        self,
        config: SpeculativeConfig,
        costs: StepCosts = DEFAULT_COSTS,
        max_corpus_tokens: int = _MAX_CORPUS_TOKENS,
    ) -> None:
        super().__init__(config, costs)
        self._max_corpus_tokens = max_corpus_tokens
        self.corpus = _Corpus(max_corpus_tokens)

    def _continuation(self, request: Request, drafts: RequestDrafts, most: int) -> Sequence[int]:
        tokens = request.token_ids
        if len(tokens) < _KEY or not drafts.index.extend(tokens):
            return ()
        own = drafts.index.places(tokens, len(tokens))
        length, found = longest(tokens, own, tokens, _KEY, _MAX_MATCH)
        places: list[tuple[Sequence[int], int]] = [(tokens, place) for place in found]
        others_length, others = self.corpus.find(request.cache_salt, tokens, length)
        places = others if others_length > length else places + others
        if len(places) == 1:
            (source, place) = places[0]
            return continued(source, place, most) if source is tokens else source[place:][:most]
        return _most_frequent(places, most)

    def end(self, request: Request) -> None:
        super().end(request)
        if request.finish_reason in ("stop", "length"):
            answer = request.output_token_ids[-_MAX_ANSWER_TOKENS:]
            self.corpus.add(request.cache_salt, answer)

    def reset(self) -> None:
        super().reset()
        # An interrupt may have left it half changed.
        self.corpus = _Corpus(self._max_corpus_tokens)


def _most_frequent(places: list[tuple[Sequence[int], int]], most: int) -> list[int]:
    """The continuation on which the most places agree, token by token. Of equally frequent tokens
    the one of the newest place is taken."""
    found: list[int] = []
    num_places = len(places)
    while len(found) < most:
        counts: dict[int, int] = {}
        for source, place in places:
            if place < len(source):
                token = source[place]
                counts[token] = counts.get(token, 0) + 1
        if not counts:
            break
        best = max(counts, key=counts.__getitem__)
        if counts[best] < _LEAST_SHARE * num_places:
            break
        found.append(best)
        places = [(s, p + 1) for s, p in places if p < len(s) and s[p] == best]
    return found


class ModelDrafter(PredictionDrafter):
    """Proposes what the runner drafted with a second model behind the request's previous row.

    The number that it lets the runner draft is the number that it would propose in the present
    step. A request with a prediction that holds needs none. All that was drafted is proposed.
    """

    def __init__(self, config: SpeculativeConfig, costs: StepCosts = DEFAULT_COSTS) -> None:
        super().__init__(config, costs)
        self.max_wanted_drafts = self.max_draft_tokens
        self.mode = DraftMode(self.max_draft_tokens, costs, self._state_of, None)

    def _state_of(self, request: Request) -> RequestDrafts | None:
        drafts = super()._state_of(request)
        if drafts is not None:
            drafts.share = 1.0  # a model always has a proposal
        return drafts

    def propose(self, request: Request) -> Sequence[int]:
        drafts = self._state_of(request)
        if drafts is None or is_long_row(request):
            return ()
        end, offered = drafts.offered
        is_offered = end == len(request.token_ids)
        most = len(offered) if is_offered else self.mode.number(request, drafts)
        found = self._found(request, most) if most else ()
        if found:
            drafts.end = len(request.token_ids)
        return found

    def _continuation(self, request: Request, drafts: RequestDrafts, most: int) -> Sequence[int]:
        end, offered = drafts.offered
        return offered[:most] if end == len(request.token_ids) else ()

    def wanted(self, request: Request) -> int:
        drafts = self._state_of(request)
        if drafts is None or (drafts.is_predicted and drafts.end == len(request.token_ids)):
            return 0
        return self.mode.number(request, drafts)

    def offer(self, request: Request, token_ids: Sequence[int]) -> None:
        drafts = self._state_of(request)
        if drafts is not None:
            drafts.offered = len(request.token_ids), token_ids


def make_drafter(config: SpeculativeConfig, costs: StepCosts = DEFAULT_COSTS) -> PredictionDrafter:
    """The drafter of a method."""
    kinds: dict[str, type[PredictionDrafter]] = {
        "ngram": NgramDrafter,
        "suffix": SuffixDrafter,
        "prediction": PredictionDrafter,
        **dict.fromkeys(MODEL_METHODS, ModelDrafter),
    }
    return kinds[config.method](config, costs)
