"""Results of requests (outputs and metrics, named as in vLLM), and the statistics of an engine."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

from .logprob_lists import PromptLogprobs, SampleLogprobs

logger = logging.getLogger("pagespec")


@dataclass(slots=True)
class RequestMetrics:
    """Times and counts of one request. For several continuations, see :func:`joined`.

    Attributes:
        queue_time_s: seconds from arrival until its first tokens were scheduled.
        time_to_first_token_s: seconds from arrival until its first token was settled; None if it
            ended earlier.
        total_time_s: seconds from arrival until it finished.
        tokens_per_second: decode rate: output tokens after the first, divided by their time; None
            with fewer than two tokens.
        num_cached_tokens: prompt tokens found in the prefix cache at the first admission.
        num_preemptions: how often it was preempted and its tokens were recomputed.
        num_draft_tokens: draft tokens that were computed for it (docs/speculation.md).
        num_accepted_tokens: those that were accepted.
    """

    queue_time_s: float | None = None
    time_to_first_token_s: float | None = None
    total_time_s: float | None = None
    tokens_per_second: float | None = None
    num_cached_tokens: int = 0
    num_preemptions: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0


def joined(metrics: Sequence[RequestMetrics]) -> RequestMetrics:
    """The metrics of all continuations of one prompt: the wait and cache hits of the first, the
    time until the last one finished, and the sums of preemptions, rates and draft tokens."""
    first = metrics[0]
    totals = [m.total_time_s for m in metrics if m.total_time_s is not None]
    rates = [m.tokens_per_second for m in metrics if m.tokens_per_second is not None]
    return replace(
        first,
        total_time_s=max(totals, default=None),
        tokens_per_second=sum(rates) if rates else None,
        num_preemptions=sum(m.num_preemptions for m in metrics),
        num_draft_tokens=sum(m.num_draft_tokens for m in metrics),
        num_accepted_tokens=sum(m.num_accepted_tokens for m in metrics),
    )


@dataclass(slots=True)
class CompletionOutput:
    """One generated continuation. Positional arguments have vLLM's order.

    Attributes:
        index: index among the request's continuations, from 0.
        text: decoded text, cut before a stop string, without special tokens and without the stop
            token that ended it (as in vLLM); "" if the model has no tokenizer. For incomplete
            characters see :mod:`.text.detokenizer`.
        token_ids: every generated id, including the end or stop token.
        cumulative_logprob: the sum of the log-probabilities of ``token_ids``; None without
            ``logprobs``. In a DELTA output, the sum over the whole answer so far.
        logprobs: for each of ``token_ids``, a dict by token id with its log-probability and those
            of the ``logprobs`` most likely tokens; None without ``logprobs``. The dicts are created
            on first access. With ``flat_logprobs``, a ``FlatLogprobs``.
        routed_experts: always None.
        finish_reason: "stop" (end token, stop token or stop string), "length" (max_tokens or
            max_model_len) or "abort". (A request with reason "error" has no output: its call
            raises EngineError.) None until the continuation has ended.
        stop_reason: the stop string, or the token of ``stop_token_ids``, that ended it; None for
            the model's end tokens and any other end.
        lora_request: always None.
        message: with ``LLM.chat``, the answer as a message in OpenAI's form (``role``,
            ``content``, ``reasoning_content``, ``tool_calls``); otherwise, and with
            ``detokenize=False``, None.
    """

    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None = None
    logprobs: SampleLogprobs | None = None
    routed_experts: Any = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    lora_request: Any = None
    message: dict[str, Any] | None = None

    def finished(self) -> bool:
        """Whether the continuation has ended."""
        return self.finish_reason is not None

    def extend(self, later: CompletionOutput) -> None:
        """Append what was generated later."""
        self.text += later.text
        self.token_ids = [*self.token_ids, *later.token_ids]
        if later.logprobs is not None:
            so_far = [] if self.logprobs is None else self.logprobs[:]
            if not so_far and not isinstance(later.logprobs, list):
                so_far = later.logprobs[:0]  # flat lists
            so_far.extend(later.logprobs)
            self.logprobs = so_far
        self.cumulative_logprob = later.cumulative_logprob
        self.finish_reason, self.stop_reason = later.finish_reason, later.stop_reason


@dataclass(slots=True, init=False)
class RequestOutput:
    """The answers to a request. Positional arguments have vLLM's order; keyword arguments that do
    not exist are ignored with a warning, as in vLLM.

    Attributes:
        prompt: None when token ids were given.
        prompt_logprobs: as :attr:`CompletionOutput.logprobs`, for each prompt token; None for the
            first token, which has no predecessor. None without ``prompt_logprobs``.
        finished: whether all answers have ended, as in ``LLM``'s results.
        num_cached_tokens: prompt tokens found in the prefix cache; unless given, that of
            ``metrics``.
        lora_request, encoder_prompt, encoder_prompt_token_ids, kv_transfer_params: always None in
            results.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    prompt_logprobs: PromptLogprobs | None
    outputs: list[CompletionOutput]
    finished: bool
    metrics: RequestMetrics
    lora_request: Any
    encoder_prompt: str | None
    encoder_prompt_token_ids: list[int] | None
    num_cached_tokens: int | None
    kv_transfer_params: dict[str, Any] | None

    def __init__(
        self,
        request_id: str,
        prompt: str | None,
        prompt_token_ids: list[int],
        prompt_logprobs: PromptLogprobs | None = None,
        outputs: list[CompletionOutput] | None = None,
        finished: bool = True,
        metrics: RequestMetrics | None = None,
        lora_request: Any = None,
        encoder_prompt: str | None = None,
        encoder_prompt_token_ids: list[int] | None = None,
        num_cached_tokens: int | None = None,
        *,
        kv_transfer_params: dict[str, Any] | None = None,
        **ignored: Any,
    ) -> None:
        if ignored:
            logger.warning("RequestOutput: ignored arguments: %s", ", ".join(ignored))
        self.request_id, self.prompt = request_id, prompt
        self.prompt_token_ids, self.prompt_logprobs = prompt_token_ids, prompt_logprobs
        self.outputs = [] if outputs is None else outputs
        self.finished = finished
        self.metrics = RequestMetrics() if metrics is None else metrics
        self.lora_request, self.kv_transfer_params = lora_request, kv_transfer_params
        self.encoder_prompt = encoder_prompt
        self.encoder_prompt_token_ids = encoder_prompt_token_ids
        if num_cached_tokens is None:
            num_cached_tokens = self.metrics.num_cached_tokens
        self.num_cached_tokens = num_cached_tokens

    def add(self, next_output: RequestOutput, aggregate: bool) -> None:
        """Merge a later output of the same request. Name and arguments as in vLLM.

        Args:
            aggregate: append answers to those of the same index; otherwise replace these.
        """
        self.finished |= next_output.finished
        places = {answer.index: place for place, answer in enumerate(self.outputs)}
        for answer in next_output.outputs:
            place = places.get(answer.index)
            if place is None:
                self.outputs.append(answer)
            elif aggregate:
                self.outputs[place].extend(answer)
            else:
                self.outputs[place] = answer


@dataclass(slots=True)
class ScoreOutput:
    """The log-probability of each token of a prompt, given the tokens before it.

    Attributes:
        prompt: None when token ids were given.
        tokens: the text of each token as inside a text; None if the model has no tokenizer.
        logprobs: None for the first token, which has no predecessor.
        ranks: see :class:`Logprob`; 1 for a token that greedy sampling would have chosen.
    """

    prompt: str | None
    prompt_token_ids: list[int]
    tokens: list[str] | None
    logprobs: list[float | None]
    ranks: list[int | None]

    @property
    def total_logprob(self) -> float:
        """The sum over all tokens but the first."""
        return sum(logprob for logprob in self.logprobs if logprob is not None)


_PARTS = {
    "load": "loading the model",
    "probe": "probing its attention",
    "capture": "tracing its graph",
    "kv_cache": "allocating the KV cache",
    "graphs": "capturing CUDA graphs",
}


@dataclass(slots=True, kw_only=True)
class EngineStats:
    """A snapshot of cumulative counters, which are never reset.

    Attributes:
        attention: the attention implementation; attention_reason: why it was chosen.
        num_captures: graphs traced from the model; 0 if the graph was read from the disk cache.
        num_compilations: in this process, pieces compiled by Inductor plus variants of Triton and
            Gluon kernels; compiled, or loaded from the disk cache.
        num_graphs: CUDA graphs captured.
        num_steps: steps dispatched.
        num_drafts: settled rows with draft tokens. num_draft_tokens: their draft tokens.
        num_accepted_tokens: accepted draft tokens. accepted_per_position: these by their place in
            the draft; empty without ``speculative_config``.
        quantization: the format of quantised weights, as text; None if there are none.
        weight_formats: if quantised, number of weight elements per format ("int4", "fp8", or a
            dtype); otherwise empty. float32_matrices: names of matrices that are not quantised (on
            a GPU these have the model's dtype).
        library_matmuls: on a GPU with ``transparent``, the number of weight matmuls that cuBLAS
            computes, per operation. A row's bits may then depend on the number of rows
            (docs/transparency.md).
        startup_s: seconds of start-up by phase ("load", "probe", "capture", "compile", "kv_cache",
            "graphs").
        memory_bytes: "weights", "kv_cache", "states" (of recurrent layers), "activations",
            "graphs", "peak", "budget", "total"; empty on a CPU.
        host_s: seconds of the engine's thread by part ("schedule", "pack", "masks", "commit",
            "wait"); masks: waiting for bitmasks of constrained rows; wait: waiting for the device.
    """

    attention: str = ""
    attention_reason: str = ""
    num_captures: int = 0
    num_compilations: int = 0
    num_graphs: int = 0
    num_steps: int = 0
    num_drafts: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    accepted_per_position: list[int] = field(default_factory=list)
    startup_s: dict[str, float] = field(default_factory=dict)
    memory_bytes: dict[str, int] = field(default_factory=dict)
    quantization: str | None = None
    weight_formats: dict[str, int] = field(default_factory=dict)
    float32_matrices: list[str] = field(default_factory=list)
    library_matmuls: dict[str, int] = field(default_factory=dict)
    host_s: dict[str, float] = field(default_factory=dict)

    @contextmanager
    def timed(self, part: str) -> Iterator[None]:
        """Log that a phase of start-up begins, and add the duration of a block to it."""
        logger.info("%s ...", _PARTS.get(part, part))
        begin = time.perf_counter()
        yield
        self.startup_s[part] = self.startup_s.get(part, 0.0) + time.perf_counter() - begin
