"""Beam search by requests of one token. Names as in vLLM.

Each step extends every beam by its most likely tokens, with one request of one token per beam. The
prefix cache holds the beams' earlier tokens, so that a step computes one token per beam.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from ..errors import InvalidInputError
from ..params.checks import count, flag, number
from ..params.declare import check_fields, param
from .inputs import PromptInput
from .logprob_lists import LogprobsOnePosition
from .outputs import RequestOutput
from .sampling_params import SamplingParams


def _zero(name: str, value: Any) -> float:
    return number(0.0, 0.0, "0: tokens are ranked by the model's own log-probabilities")(
        name, value
    )


def _nothing(name: str, value: Any) -> Any:
    raise InvalidInputError(name, value, "must be None: beam search has no constraints")


@dataclass
class BeamSearchParams:
    """
    Attributes:
        beam_width: number of beams, and of results per prompt. A step ranks twice as many tokens
            per beam, which ``max_logprobs`` of the engine limits.
        max_tokens: most tokens after the prompt.
        ignore_eos: the model's end tokens do not end a beam.
        temperature: only 0.
        length_penalty: the sum of log-probabilities is divided by the number of tokens, with the
            prompt and without the end token, to this power.
        include_stop_str_in_output: keep the end token of a beam.
        structured_outputs: only None.

    Raises:
        InvalidInputError: a field is outside its limits.
    """

    beam_width: int = param(check=count())
    max_tokens: int = param(check=count())
    ignore_eos: bool = param(False, check=flag())
    temperature: float = param(0.0, check=_zero)
    length_penalty: float = param(1.0, check=number(-1e6, 1e6, "from -1e6 to 1e6"))
    include_stop_str_in_output: bool = param(False, check=flag())
    structured_outputs: Any = param(None, check=_nothing)  # noqa: RUF009

    def __post_init__(self) -> None:
        check_fields(self)


@dataclass
class BeamSearchSequence:
    """
    Attributes:
        tokens: those of the prompt, then those of the beam.
        logprobs: per token of the beam, the log-probabilities that were ranked.
        cum_logprob: the sum for the tokens of the beam, its end token included.
        text: of all tokens, special ones included; None without a tokenizer.
        finish_reason: "stop" at an end token, which is ``stop_reason``; else "length".
    """

    tokens: list[int]
    logprobs: list[LogprobsOnePosition] = field(default_factory=list)
    cum_logprob: float = 0.0
    text: str | None = None
    finish_reason: str | None = None
    stop_reason: int | None = None


@dataclass
class BeamSearchOutput:
    """``sequences``: ``beam_width`` beams, best first; fewer if the vocabulary has no more."""

    sequences: list[BeamSearchSequence]


class _Search:
    """The beams of one prompt.

    Args:
        end_token_ids: tokens that end a beam.
    """

    def __init__(
        self, prompt: PromptInput, params: BeamSearchParams, end_token_ids: frozenset[int]
    ) -> None:
        self._prompt, self._params = prompt, params
        self._ends = frozenset() if params.ignore_eos else end_token_ids
        self.beams = [BeamSearchSequence(list(prompt.token_ids))]
        self._ended: list[tuple[float, BeamSearchSequence]] = []

    def prompts(self) -> list[PromptInput]:
        known = replace(self._prompt, text=None, prediction=())
        return [replace(known, token_ids=beam.tokens) for beam in self.beams]

    def extend(self, ranked: Sequence[LogprobsOnePosition]) -> None:
        """Replace the beams by the best of their extensions; ``ranked``: per beam, its tokens."""
        extended = []
        for beam, entries in zip(self.beams, ranked, strict=True):
            for token_id, entry in entries.items():
                total = beam.cum_logprob + entry.logprob
                logprobs = [*beam.logprobs, entries]
                if token_id not in self._ends:
                    extended.append(BeamSearchSequence([*beam.tokens, token_id], logprobs, total))
                    continue
                kept = [token_id] if self._params.include_stop_str_in_output else []
                made = BeamSearchSequence([*beam.tokens, *kept], logprobs, total)
                made.finish_reason, made.stop_reason = "stop", token_id
                self._ended.append((self._score(total, len(beam.tokens)), made))
        extended.sort(key=lambda beam: beam.cum_logprob, reverse=True)  # stable
        self.beams = extended[: self._params.beam_width]

    def output(self, decode: Callable[[list[int]], str] | None) -> BeamSearchOutput:
        for beam in self.beams:
            beam.finish_reason = "length"
            self._ended.append((self._score(beam.cum_logprob, len(beam.tokens)), beam))
        best = sorted(self._ended, key=lambda ended: ended[0], reverse=True)
        sequences = [beam for _, beam in best[: self._params.beam_width]]
        for beam in sequences:
            beam.text = None if decode is None else decode(beam.tokens)
        return BeamSearchOutput(sequences)

    def _score(self, cum_logprob: float, num_tokens: int) -> float:
        return float(cum_logprob / num_tokens**self._params.length_penalty)


@dataclass(frozen=True)
class BeamSearcher:
    """Searches with one engine.

    Attributes:
        extend: ``GenerationLoop.run``, which continues prompts; its last argument is whether it
            shows a bar.
        end_token_ids: tokens that end a beam.
        max_model_len: most tokens of prompt plus beam.
        decode: the text of tokens; None without a tokenizer.
    """

    extend: Callable[[list[PromptInput], list[SamplingParams], bool], Sequence[RequestOutput]]
    end_token_ids: frozenset[int]
    max_model_len: int
    decode: Callable[[list[int]], str] | None

    def search(
        self, prompts: Sequence[PromptInput], params: Any, concurrency_limit: Any = None
    ) -> list[BeamSearchOutput]:
        """The best continuations of each prompt.

        Raises:
            InvalidInputError: an argument is refused.
        """
        if not isinstance(params, BeamSearchParams):
            raise InvalidInputError("params", params, "must be a BeamSearchParams")
        for prompt in prompts:
            most = self.max_model_len - len(prompt.token_ids)
            if params.max_tokens > most:
                limit = f"must be at most {most}, the rest of max_model_len = {self.max_model_len}"
                raise InvalidInputError("max_tokens", params.max_tokens, limit)
        size = len(prompts) or 1
        if concurrency_limit is not None:
            size = count()("concurrency_limit", concurrency_limit)
        found: list[BeamSearchOutput] = []
        for begin in range(0, len(prompts), size):
            found += self._search_together(prompts[begin : begin + size], params)
        return found

    def _search_together(
        self, prompts: Sequence[PromptInput], params: BeamSearchParams
    ) -> list[BeamSearchOutput]:
        found = [_Search(prompt, params, self.end_token_ids) for prompt in prompts]
        one = SamplingParams(
            temperature=0.0, max_tokens=1, logprobs=2 * params.beam_width, detokenize=False
        )
        for _ in range(params.max_tokens):
            live = [search for search in found if search.beams]
            given = [prompt for search in live for prompt in search.prompts()]
            if not given:
                break
            outputs = self.extend(given, [one] * len(given), False)
            ranked = iter([dict((o.outputs[0].logprobs or [{}])[0]) for o in outputs])
            for search in live:
                search.extend([next(ranked) for _ in search.beams])
        return [search.output(self.decode) for search in found]
