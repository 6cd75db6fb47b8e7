"""Makes requests from a checked prompt, and a ``RequestOutput`` from finished requests."""

from __future__ import annotations

import itertools
import math
import struct
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import cache, cached_property
from typing import Any, Protocol

import xxhash

from ..errors import InvalidInputError
from .config import MAX_LOGPROBS
from .inputs import PromptInput
from .logit_edits import LogitEdits, bad_word_ids
from .logits_processors import ProcessorClasses
from .logprob_output import add_logprobs
from .outputs import CompletionOutput, RequestMetrics, RequestOutput, joined
from .request import Request
from .sampling_params import SamplingParams
from .structured_outputs import StructuredOutputs
from .text.detokenizer import Detokenizer, StopStringWatcher, decode_output
from .text.reasoning import Reasoning, ReasoningTracker
from .text.token_bytes import TokenBytes

_SEED_SPAN = 1 << 64


class Structures(Protocol):
    """The compiled constraints that a runner keeps."""

    def check(self, outputs: StructuredOutputs, reasoning: Reasoning | None = None) -> None:
        """Compile a constraint, unless it is compiled already.

        Args:
            reasoning: reasoning that may precede the constrained content.

        Raises:
            InvalidInputError, EngineBusyError: it cannot be kept, or cannot be compiled now.
        """
        ...

    def is_known(self, outputs: StructuredOutputs) -> bool:
        """Whether a constraint is compiled and kept."""
        ...


class RequestFactory:
    """Makes requests for one model and numbers them.

    Args:
        tokenizer: a transformers tokenizer, or None.
        vocab_size: token ids are below it.
        eos_token_ids: tokens that end a request unless it ignores them.
        max_model_len: maximum number of tokens of prompt plus output.
        seed: engine seed, from which seeds of requests without one are derived.
        max_logprobs: most log-probabilities per position; -1: all of the vocabulary.
        has_raw_logprobs: whether log-probabilities are of the model's own distribution.
        can_score: whether the runner computes log-probabilities of prompts.
        encode: returns a text's token ids without special tokens, for ``bad_words``.
        structures: the runner's constraints; None with several ranks, which support none.
        processors: the engine's classes that edit logits; None: there are none.
    """

    def __init__(
        self,
        tokenizer: Any,
        *,
        vocab_size: int,
        eos_token_ids: frozenset[int],
        max_model_len: int,
        seed: int,
        max_logprobs: int = MAX_LOGPROBS,
        has_raw_logprobs: bool = True,
        can_score: bool = True,
        encode: Callable[[str], Sequence[int]] | None = None,
        structures: Structures | None = None,
        processors: ProcessorClasses | None = None,
    ) -> None:
        self._tokenizer = tokenizer
        self._encode = encode
        self.structures = structures
        self._processors = processors
        self._vocab_size = vocab_size
        self.eos_token_ids = frozenset(i for i in eos_token_ids if 0 <= i < vocab_size)
        self._max_model_len = max_model_len
        self._seed = seed
        self._max_logprobs = vocab_size if max_logprobs == -1 else max_logprobs
        self._has_raw_logprobs = has_raw_logprobs
        self._can_score = can_score
        self._numbers = itertools.count()  # shared by threads

    def make(
        self, prompt: PromptInput, params: SamplingParams, *, checks_structure: bool = True
    ) -> list[Request]:
        """The continuations of a prompt, the leader first; usually one.

        Args:
            checks_structure: compile the constraint here, which may take seconds; otherwise the
                caller compiles it with :attr:`structures`.

        Raises:
            InvalidInputError: ``params`` do not fit the model.
        """
        if not isinstance(params, SamplingParams):
            raise InvalidInputError("sampling_params", params, "must be a SamplingParams")
        params = self._with_known_logprobs(params.frozen())
        for name in ("stop_token_ids", "allowed_token_ids", "logit_bias", "logprob_token_ids"):
            self._check_token_ids(name, getattr(params, name) or ())
        self._check_spaces(params)
        self._check_structured_outputs(prompt, params, checks_structure)
        if params.logprob_token_ids and not self._has_raw_logprobs:
            limit = "must be empty with logprobs_mode = 'processed_logprobs'"
            raise InvalidInputError("logprob_token_ids", params.logprob_token_ids, limit)
        is_ranked = params.num_generated > params.n and params.logprobs is None
        if params.logprob_token_ids or is_ranked:  # best_of ranks by them
            params = replace(params, logprobs=0).frozen()
        for is_refused, reason in (
            (not self._can_score, "this model's output head was not found"),
            (prompt.segments is not None, "the prompt has other content than tokens"),
        ):
            if is_refused and params.prompt_logprobs is not None:
                limit = f"must be None: {reason}"
                raise InvalidInputError("prompt_logprobs", params.prompt_logprobs, limit)
        if params.stop_strings and self._tokenizer is None:
            raise InvalidInputError("stop", params.stop, "this model has no tokenizer")
        # The last token is sampled but never computed, so a scored prompt may fill the context.
        max_num_tokens = self._max_model_len + prompt.is_scored
        if params.max_tokens is not None:
            max_num_tokens = min(max_num_tokens, len(prompt.token_ids) + params.max_tokens)
        ends = self._ends_of(prompt)
        stops = frozenset() if params.ignore_eos else ends
        is_constrained = params.structured_outputs is not None
        own_ends = stops - self.eos_token_ids if is_constrained else frozenset()
        # min_tokens bans the model's end tokens even if they would not end the request.
        early = ends.union(params.stop_token_ids or ())
        # A scored prompt's sampled token is discarded: no edits are needed.
        edits = None if prompt.is_scored else self._edits(params, early, prompt.token_ids)
        number = next(self._numbers)
        leader = Request(
            str(number),
            prompt.token_ids,
            params,
            max_num_tokens=max_num_tokens,
            stop_token_ids=stops.union(params.stop_token_ids or ()),
            on_token=self._watcher(prompt, params),
            seed=self._seed_of(params, 0, number),
            priority=prompt.priority,
            owner=prompt.owner,
            cache_salt=prompt.cache_salt,
            edits=edits,
            reasoning=prompt.reasoning if is_constrained else None,
            end_token_ids=own_ends,
            early_stop_ids=early if is_constrained and params.min_tokens else frozenset(),
            segments=prompt.segments,
            prediction=prompt.prediction,
            reads_cache=not params.skip_reading_prefix_cache,
        )
        requests = [leader]
        for index in range(1, params.num_generated):
            number = next(self._numbers)
            seed = self._seed_of(params, index, number)
            if self._processors is not None:  # each continuation has its own objects
                edits = self._edits(params, early, prompt.token_ids)
            watcher = self._watcher(prompt, params)
            requests.append(leader.sibling(str(number), seed, watcher, edits))
        return requests

    def _with_known_logprobs(self, params: SamplingParams) -> SamplingParams:
        """``params`` with numbers of log-probabilities in place of -1, within the limit."""
        for name in ("logprobs", "prompt_logprobs"):
            given = getattr(params, name)
            if given is None:
                continue
            wanted = self._vocab_size if given == -1 else given
            if wanted > self._max_logprobs:
                limit = f"must be at most max_logprobs = {self._max_logprobs}"
                limit += f"; -1 stands for {wanted}, the vocabulary" if given == -1 else ""
                raise InvalidInputError(name, given, limit)
            if given == -1:
                changed: dict[str, Any] = {name: wanted}
                params = replace(params, **changed).frozen()
        return params

    def _ends_of(self, prompt: PromptInput) -> frozenset[int]:
        if not prompt.end_token_ids:
            return self.eos_token_ids
        return self.eos_token_ids | {i for i in prompt.end_token_ids if i < self._vocab_size}

    def _watcher(self, prompt: PromptInput, params: SamplingParams) -> StopStringWatcher | None:
        if not params.stop_strings:
            return None
        detokenizer = Detokenizer(
            self._tokenizer, prompt.token_ids, skip_special_tokens=params.skip_special_tokens
        )
        return StopStringWatcher(
            detokenizer,
            params.stop_strings,
            include=params.include_stop_str_in_output,
            min_tokens=params.min_tokens,
            tracker=self._tracker(prompt.reasoning, params),
            stops_inside=prompt.reasoning is not None and prompt.reasoning.stops_inside,
        )

    def _tracker(
        self, reasoning: Reasoning | None, params: SamplingParams
    ) -> ReasoningTracker | None:
        """None if the start of the content does not matter."""
        if reasoning is None or (reasoning.stops_inside and params.structured_outputs is None):
            return None
        return ReasoningTracker(reasoning, self._token_bytes)

    def _seed_of(self, params: SamplingParams, index: int, number: int) -> int:
        """The seed of continuation ``index``, whose request number is ``number``."""
        if params.seed is None:
            return xxhash.xxh3_64_intdigest(struct.pack("<qq", self._seed, number))
        seed = params.seed + index
        return seed if seed < _SEED_SPAN else seed - _SEED_SPAN

    def _check_token_ids(self, name: str, token_ids: Iterable[int]) -> None:
        for token_id in token_ids:
            if token_id >= self._vocab_size:
                raise InvalidInputError(name, token_id, f"ids must be below {self._vocab_size}")

    def _check_spaces(self, params: SamplingParams) -> None:
        """Refuse ``spaces_between_special_tokens=False`` if the tokenizer writes such spaces. Fast
        tokenizers, except word-piece ones, write none."""
        if params.spaces_between_special_tokens or params.skip_special_tokens:
            return
        for token in getattr(self._tokenizer, "all_special_tokens", ())[:1]:
            token_id = self._tokenizer.convert_tokens_to_ids(token)
            if self._tokenizer.decode([token_id] * 2, skip_special_tokens=False) != 2 * token:
                limit = "must be True: this tokenizer writes such spaces"
                raise InvalidInputError("spaces_between_special_tokens", False, limit)

    def _check_structured_outputs(
        self, prompt: PromptInput, params: SamplingParams, is_compiled: bool
    ) -> None:
        outputs = params.structured_outputs
        if outputs is None:
            return
        if self.structures is None:
            limit = "is not supported with tensor_parallel_size > 1"
            raise InvalidInputError("structured_outputs", outputs, limit)
        if is_compiled:
            self.structures.check(outputs, prompt.reasoning)

    def _edits(
        self, params: SamplingParams, early: frozenset[int], prompt_ids: Sequence[int]
    ) -> LogitEdits | None:
        """``early``: the tokens that ``min_tokens`` bans."""
        if params.extra_args and self._processors is None:
            limit = "(vllm_xargs over HTTP) is not supported without the engine argument "
            limit += "logits_processors, whose classes read it"
            raise InvalidInputError("extra_args", params.extra_args, limit)
        bad_words: list[tuple[int, ...]] = []
        if params.bad_words:
            if self._encode is None:
                limit = "this model has no tokenizer"
                raise InvalidInputError("bad_words", list(params.bad_words), limit)
            bad_words = bad_word_ids(self._encode, params.bad_words)
            self._check_token_ids("bad_words", itertools.chain(*bad_words))
        own = () if self._processors is None else self._processors.of(params, prompt_ids)
        return LogitEdits.of(params, early, bad_words, own)

    def output(
        self, requests: Sequence[Request], prompt: PromptInput, metrics: Sequence[RequestMetrics]
    ) -> RequestOutput:
        """The result of ``requests``, the finished continuations of a prompt."""
        output = RequestOutput(
            request_id=requests[0].request_id,
            prompt=prompt.text,
            prompt_token_ids=prompt.token_ids,
            outputs=[self.completion(i, request, prompt) for i, request in enumerate(requests)],
            metrics=joined(metrics) if len(metrics) > 1 else metrics[0],
        )
        decode = self.decode_one if requests[0].sampling_params.detokenize else None
        add_logprobs(output, requests, decode)
        num_kept = requests[0].sampling_params.n
        if num_kept < len(requests):
            output.outputs = sorted(output.outputs, key=_unlikelihood)[:num_kept]
            for index, answer in enumerate(output.outputs):
                answer.index = index
        return output

    def completion(self, index: int, request: Request, prompt: PromptInput) -> CompletionOutput:
        """One finished continuation, without its log-probabilities."""
        params, finish_reason = request.sampling_params, request.finish_reason
        watcher, stop_token_id = request.on_token, request.stop_token_id
        stop_reason: int | str | None = None
        if isinstance(watcher, StopStringWatcher):
            text = watcher.finish(stop_token_id if params.include_stop_str_in_output else None)
            if watcher.is_stopped and finish_reason == "length":
                finish_reason = "stop"  # stopped by U+FFFD, incomplete until the end
            stop_reason = watcher.found
        elif self._tokenizer is not None and params.detokenize:
            text = decode_output(
                self._tokenizer,
                prompt.token_ids,
                request.text_token_ids,
                skip_special_tokens=params.skip_special_tokens,
            )
        else:
            text = ""
        if stop_token_id is not None:
            is_end = stop_token_id in self._ends_of(prompt) and not params.ignore_eos
            stop_reason = None if is_end else stop_token_id
        return CompletionOutput(
            index,
            text,
            request.output_token_ids,
            finish_reason=finish_reason,
            stop_reason=stop_reason if finish_reason == "stop" else None,
        )

    @property
    def token_bytes(self) -> TokenBytes | None:
        """The bytes of single tokens; None without a tokenizer."""
        return None if self._tokenizer is None else self._token_bytes

    @cached_property
    def _token_bytes(self) -> TokenBytes:
        return TokenBytes(self._tokenizer)

    @cached_property
    def decode_one(self) -> Callable[[int], str] | None:
        """Decodes a token as in the middle of a text, cached; None without a tokenizer."""
        return None if self._tokenizer is None else cache(self._token_bytes.text)


def _unlikelihood(answer: CompletionOutput) -> float:
    """Minus the log-probability; infinite for NaN, which cannot be ordered."""
    total = answer.cumulative_logprob
    return math.inf if total is None or math.isnan(total) else -total
