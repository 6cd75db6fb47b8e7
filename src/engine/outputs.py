"""Results of requests (outputs and metrics, by vLLM's names), and the statistics of an engine."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any


@dataclass(slots=True)
class RequestMetrics:
    """Times and counts of one request; of several continuations as :func:`joined` says.

    Attributes:
        queue_time_s: from arrival until its first tokens were scheduled, seconds.
        time_to_first_token_s: from arrival until its first token was settled, seconds; None if it
            ended before.
        total_time_s: from arrival until it finished, seconds.
        tokens_per_second: output tokens after the first, over the time they took; None with fewer
            than two tokens.
        num_cached_tokens: prompt tokens found in the prefix cache on first admission.
        num_preemptions: how often its blocks were taken and its tokens computed again.
    """

    queue_time_s: float | None = None
    time_to_first_token_s: float | None = None
    total_time_s: float | None = None
    tokens_per_second: float | None = None
    num_cached_tokens: int = 0
    num_preemptions: int = 0


def joined(metrics: Sequence[RequestMetrics]) -> RequestMetrics:
    """The metrics of all continuations of one prompt: the first's wait and cache hits, the time
    until the last had finished, and the sums of their preemptions and rates."""
    first = metrics[0]
    totals = [m.total_time_s for m in metrics if m.total_time_s is not None]
    rates = [m.tokens_per_second for m in metrics if m.tokens_per_second is not None]
    return replace(
        first,
        total_time_s=max(totals, default=None),
        tokens_per_second=sum(rates) if rates else None,
        num_preemptions=sum(m.num_preemptions for m in metrics),
    )


@dataclass(slots=True)
class Logprob:
    """The log-probability of a token at a place.

    Attributes:
        logprob: the natural logarithm, a float32; NaN where the model's logits have no finite
            maximum.
        rank: 1 plus the number of tokens before it, by logit downwards and then by id upwards. So
            ranks are distinct, and a greedy token has rank 1.
        decoded_token: its text inside a text, U+FFFD for bytes that form no character; None if the
            model has no tokenizer, or with ``detokenize=False``.
    """

    logprob: float
    rank: int | None = None
    decoded_token: str | None = None


@dataclass(slots=True)
class CompletionOutput:
    """One generated continuation.

    Attributes:
        index: position among the request's continuations, from 0.
        text: decoded text, cut before a stop string, without special tokens and without the stop
            token that ended it (as in vLLM); incomplete characters: see :mod:`.text.detokenizer`;
            "" if the model has no tokenizer.
        token_ids: every generated id, the end or stop token included.
        finish_reason: "stop" (end token, stop token or stop string), "length" (max_tokens or
            max_model_len) or "abort". (A request of reason "error" has no output: its call raises
            EngineError.)
        cumulative_logprob: the sum of the log-probabilities of ``token_ids``; None if the
            parameters have no ``logprobs``.
        logprobs: for each of ``token_ids`` its own log-probability and those of the ``logprobs``
            likeliest tokens, by id; None if the parameters have no ``logprobs``. Its dicts are made
            on access.
        stop_reason: the stop string, or the token of ``stop_token_ids``, that ended it; None for
            the model's end tokens and every other end.
        message: of ``LLM.chat``: the answer as a message of OpenAI's form (``role``, ``content``,
            ``reasoning_content``, ``tool_calls``); None otherwise, or with ``detokenize=False``.
    """

    index: int
    text: str
    token_ids: list[int]
    finish_reason: str | None
    cumulative_logprob: float | None = None
    logprobs: Sequence[dict[int, Logprob]] | None = None
    stop_reason: int | str | None = None
    message: dict[str, Any] | None = None


@dataclass(slots=True)
class RequestOutput:
    """The answers to a request; ``finished`` once all of them have ended, as ``LLM`` returns them.

    Attributes:
        prompt: None when token ids were given.
        prompt_logprobs: for each prompt token as :attr:`CompletionOutput.logprobs`; None for the
            first, which follows nothing. None if the parameters have no ``prompt_logprobs``.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    metrics: RequestMetrics = field(default_factory=RequestMetrics)
    finished: bool = True
    prompt_logprobs: Sequence[dict[int, Logprob] | None] | None = None

    @property
    def num_cached_tokens(self) -> int:
        """Prompt tokens found in the prefix cache: ``metrics.num_cached_tokens`` by vLLM's name."""
        return self.metrics.num_cached_tokens


@dataclass(slots=True)
class ScoreOutput:
    """The log-probability of each token of a prompt, given those before it.

    Attributes:
        prompt: None when token ids were given.
        tokens: the text of each token inside a text; None if the model has no tokenizer.
        logprobs: None for the first token, which follows nothing.
        ranks: as of :class:`Logprob`; 1 for a token that greedy sampling would have chosen.
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


@dataclass(slots=True, kw_only=True)
class EngineStats:
    """A snapshot; counters grow, nothing is reset.

    Attributes:
        attention: the attention implementation chosen, and attention_reason why.
        num_captures: graphs traced from the model; 0 if the graph was read from the disk.
        num_compilations: pieces compiled by Inductor, and forms of Triton's and Gluon's kernels,
            in this process; compiled or taken from the disk.
        num_graphs: CUDA graphs captured.
        num_steps: steps dispatched.
        quantization: how weights are held that stay quantised, in words; None if none are.
        weight_formats: then, how many elements of the weights are held in which format ("int4",
            "fp8", or a dtype); else empty. float32_matrices: which stay in float32, on a GPU in
            the model's dtype, by name.
        library_matmuls: of a transparent engine on a GPU, by operation, the number of matmuls with
            weights that cuBLAS computes. A row's bits may then depend on the number of rows
            (docs/transparency.md).
        startup_s: seconds of start-up by part ("load", "probe", "capture", "compile", "kv_cache",
            "graphs").
        memory_bytes: "weights", "kv_cache", "states" (of recurrent layers), "activations",
            "graphs", "peak", "budget", "total"; empty on a CPU.
        host_s: seconds of the engine's thread by part ("schedule", "pack", "masks", "commit",
            "wait"); masks is waiting for masks of constrained rows, wait is for the device.
    """

    attention: str = ""
    attention_reason: str = ""
    num_captures: int = 0
    num_compilations: int = 0
    num_graphs: int = 0
    num_steps: int = 0
    startup_s: dict[str, float] = field(default_factory=dict)
    memory_bytes: dict[str, int] = field(default_factory=dict)
    quantization: str | None = None
    weight_formats: dict[str, int] = field(default_factory=dict)
    float32_matrices: list[str] = field(default_factory=list)
    library_matmuls: dict[str, int] = field(default_factory=dict)
    host_s: dict[str, float] = field(default_factory=dict)

    @contextmanager
    def timed(self, part: str) -> Iterator[None]:
        """Add the seconds of a block to a part of start-up."""
        begin = time.perf_counter()
        yield
        self.startup_s[part] = self.startup_s.get(part, 0.0) + time.perf_counter() - begin
