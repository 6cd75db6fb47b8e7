"""``LLM``: the public class of offline inference. Parameters named as in vLLM mean the same."""

from __future__ import annotations

import itertools
import logging
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from .chat.formats import check_formats
from .chat.messages import read_tools
from .chat.reader import ChatReader
from .chat.response import read_response, stream_deltas
from .engine.beam_search import BeamSearcher, BeamSearchOutput, BeamSearchParams
from .engine.block_manager import BlockManager
from .engine.call_arguments import (
    adds_special_tokens,
    refuse_unserved,
    truncations,
    with_priorities,
)
from .engine.config import EngineConfig, check_model
from .engine.core import Engine
from .engine.drafting.drafters import make_drafter
from .engine.generation import GenerationLoop, UseTqdm, only_text
from .engine.inputs import PromptInput, PromptReader, pair_params, split_prompts, truncation_of
from .engine.outputs import EngineStats, RequestOutput, ScoreOutput
from .engine.pace import StepPace
from .engine.policy import Policy
from .engine.request_factory import RequestFactory
from .engine.request_totals import RequestTotals
from .engine.runner import Drafter
from .engine.sampling_params import SamplingParams
from .engine.scheduler import Scheduler
from .engine.stepwise import StepwiseRequests
from .errors import InvalidInputError, PagespecError
from .llm_engine import ModelConfig, StepwiseEngine, processors_of, refuse_attribute, settings_of
from .model_name import check_model_name
from .params.checks import is_int, is_list, path_of
from .params.declare import Param, takes
from .startup import create_cuda_context_async, gc_paused, is_watched, log_shown

if TYPE_CHECKING:
    import os

    from transformers import PreTrainedModel

    from .build import BuiltEngine
    from .chat.deltas import Delta
    from .engine.metric_values import Metric

logger = logging.getLogger("pagespec")

_SHOWN_S = 0.05  # of a part of a start


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class EngineArgs(EngineConfig):
    """The arguments of ``LLM``."""

    model: str | os.PathLike[str] | PreTrainedModel = field(
        metadata={
            "param": Param(
                "A local folder, a hub id, a GGUF file, or a transformers causal language model in "
                "memory. That one is used in place: it is moved to the device and put in "
                "evaluation mode, and weights of linear layers that share an input are "
                "concatenated.",
                check_model,
            )
        }
    )


def import_engine(
    device: str = "auto", num_ranks: int = 1, model: object = None
) -> Callable[..., BuiltEngine]:
    """Import and return :func:`pagespec.build.build`.

    The import loads torch and transformers, which takes seconds. It therefore follows all cheap
    checks.

    Args:
        device: the engine's device; the CUDA context of a GPU is created during the import.
        model: the model to load; a missing path or name raises before the import.

    Raises:
        InvalidInputError, UnsupportedModelError: there is no such model.
    """
    name = path_of(model)
    if name is not None:
        check_model_name(name)
    create_cuda_context_async(device)
    logger.info("importing torch and transformers ...")
    with gc_paused():
        if num_ranks > 1:
            from .distributed.launch import build_distributed

            return build_distributed
        from .build import build
    return build


class LLMEngine(StepwiseEngine):
    """vLLM's engine that is stepped by its caller. ``LLM.llm_engine`` is the one of an ``LLM``."""

    @classmethod
    def from_engine_args(cls, engine_args: Any, usage_context: Any = None) -> LLMEngine:  # noqa: ARG003
        """Make an ``LLM``, and return its engine.

        Args:
            engine_args: any object whose attributes are arguments of ``LLM``.
            usage_context: vLLM's, for its statistics of usage, which are not collected here.

        Raises:
            InvalidInputError, UnsupportedModelError: as for ``LLM``.
        """
        return LLM.from_engine_args(engine_args).llm_engine


class LLM:
    """A loaded model, its KV cache and the engine that serves requests from them.

    Threads may share an ``LLM``: the requests of all threads are batched together. If a step fails
    or is interrupted (for example by Ctrl-C), all live requests end, including those of other
    calls, and those calls raise EngineError. The next call works again, with an empty prefix cache.
    With several ranks (``tensor_parallel_size``) the loss of one rank ends the engine: create a new
    one.

    The arguments are the model and those that :class:`.engine.config.EngineConfig` declares;
    ``help(LLM)`` and docs/engine_arguments.md list them. An argument name of vLLM or nano-vllm is
    accepted if it has the same meaning here; otherwise the error names the replacement.

    Raises:
        InvalidInputError: an argument is outside its limits.
        UnsupportedModelError: the model needs something this engine does not compute exactly.
    """

    @classmethod
    def from_engine_args(cls, engine_args: Any) -> LLM:
        """Make an ``LLM`` from any object whose attributes are its arguments, such as
        ``pagespec.EngineArgs``. Raises as the class."""
        return cls(**vars(engine_args))

    @takes(EngineArgs)
    def __init__(self, args: EngineArgs) -> None:
        check_formats(args.tool_call_format, args.reasoning_format)
        model, config = args.model, EngineConfig(**args.arguments())
        with log_shown() if is_watched() else nullcontext():
            begin = time.perf_counter()
            build = import_engine(config.device, config.tensor_parallel_size, model)
            import_s = time.perf_counter() - begin
            built = build(model, config, config.on_logits)
            parts = {"import": import_s, **built.stats.startup_s}
            logger.info(
                "ready in %.1f s: %s",
                time.perf_counter() - begin,
                ", ".join(f"{part} {s:.1f} s" for part, s in parts.items() if s >= _SHOWN_S),
            )
        config = self.config = built.config
        self._startup = built.stats
        self.tokenizer = built.tokenizer
        self.max_model_len = built.max_model_len
        self.num_blocks = built.num_blocks
        self.device = str(built.device)
        self._device = built.device
        self._runner, self.step_costs = built.runner, built.step_costs
        self.default_sampling = dict(built.default_sampling)
        self.reader = PromptReader(built.tokenizer, built.vocab_size, built.max_model_len)
        self.chat_reader = ChatReader(
            self.reader,
            built.tokenizer,
            eos_token_ids=frozenset(built.eos_token_ids),
            tool_call_format=config.tool_call_format,
            reasoning_format=config.reasoning_format,
        )
        settings = settings_of(built, model)
        self.factory = RequestFactory(
            built.tokenizer,
            vocab_size=built.vocab_size,
            eos_token_ids=frozenset(built.eos_token_ids),
            max_model_len=built.max_model_len,
            seed=config.seed,
            max_logprobs=config.max_logprobs,
            has_raw_logprobs=config.logprobs_mode == "raw_logprobs",
            can_score=built.can_score,
            encode=self.reader.encode,
            structures=built.grammars,
            processors=processors_of(config, settings),
        )
        drafter: Drafter | None = None
        if config.speculation is not None:
            drafter = lookup = make_drafter(config.speculation, built.step_costs)
            if built.grammars is not None:
                from .structured.forced import ForcedDrafter

                drafter = ForcedDrafter(built.grammars, lookup)
        scheduler = Scheduler(
            BlockManager(
                built.num_blocks,
                config.block_size,
                enable_prefix_caching=config.enable_prefix_caching,
                num_state_slots=built.num_state_slots,
                state_interval=built.state_interval,
            ),
            max_num_seqs=config.max_num_seqs,
            max_num_batched_tokens=config.num_tokens_per_step,
            pipeline_depth=built.runner.pipeline_depth,
            policy=Policy(config.policy),
            drafter=drafter,
        )
        target_s = config.max_inter_token_s(built.device.type)
        self.engine = Engine(
            scheduler,
            built.runner,
            pace=StepPace(target_s) if target_s else None,
            trace=config.trace,
            check_invariants=config.check_invariants,
        )
        totals = RequestTotals(built.max_model_len)
        self._loop = GenerationLoop(self.engine, self.factory, totals)
        self._stepwise = StepwiseRequests(self.engine, self._loop, self.factory, self.tokenizer)
        self._enqueued = itertools.count()
        self.llm_engine = LLMEngine(
            self.engine, self._stepwise, self.reader, self.tokenizer, settings, totals
        )

    @property
    def model_config(self) -> ModelConfig:
        """Settings of the model under vLLM's names, to read."""
        return self.llm_engine.model_config

    def get_tokenizer(self) -> Any:
        """The model's transformers tokenizer.

        Raises:
            InvalidInputError: the model has none.
        """
        return self.llm_engine.get_tokenizer()

    if not TYPE_CHECKING:  # type checkers would accept every name

        def __getattr__(self, name: str) -> Any:
            """Called for names that are not found, such as methods of vLLM's LLM."""
            refuse_attribute(self, name)

    # Offline generation -----------------------------------------------------------------------

    def generate(
        self,
        prompts: Any,
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: UseTqdm = True,
        lora_request: Any = None,
        priority: Sequence[int] | None = None,
        tokenization_kwargs: Mapping[str, Any] | None = None,
        mm_processor_kwargs: Mapping[str, Any] | None = None,
    ) -> list[RequestOutput]:
        """Continue each prompt. Results are in the order of the prompts.

        Args:
            prompts: a text, a list of token ids, a dict ``{"prompt": text}``,
                ``{"prompt_token_ids": [...]}`` or ``{"segments": [{"prompt_token_ids": [...]},
                ...]}``, or a list of those. Segments that are not tokens are refused for now. If
                a dict has token ids and text, the text is only kept for the result. A dict may
                also have
                ``"cache_salt"`` (text): requests with different salts share no cached blocks;
                ``"priority"`` (0, the most urgent and the default, to 256): under
                ``policy="priority"`` a request of priority p lets requests of priority 0 among the
                next 16 p arrivals go first;
                ``"owner"`` (text): under ``policy="fair"`` owners get equal shares;
                ``"prediction"`` (text or token ids of the expected answer): a hint that never
                changes the answer, used with ``speculative_config``.
            sampling_params: one for all prompts, or a list with one per prompt; the default is
                :meth:`get_default_sampling_params`.
            use_tqdm: show a progress bar on stderr; or a function that makes the bar, such as
                ``functools.partial(tqdm, leave=False)``.
            priority: one integer per prompt, in place of the priorities of the dicts.
            tokenization_kwargs: ``truncate_prompt_tokens``, or ``max_length`` with
                ``truncation=True``, replaces the parameter ``truncate_prompt_tokens``;
                ``add_special_tokens=False`` encodes texts without BOS. Others are refused.
            lora_request, mm_processor_kwargs: vLLM's; refused unless None.

        Raises:
            InvalidInputError: a prompt or parameter is refused; no prompt is computed then.
            EngineError: a step failed, in this call or in a concurrent one.
        """
        refuse_unserved(lora_request, mm_processor_kwargs)
        inputs, params = self._read_all(prompts, sampling_params, priority, tokenization_kwargs)
        return self._loop.run(inputs, params, use_tqdm)

    def _read_all(
        self, prompts: Any, sampling_params: Any, priority: Any, tokenization_kwargs: Any
    ) -> tuple[list[PromptInput], list[Any]]:
        """The prompts of :meth:`generate`, and the parameters of each."""
        items = split_prompts(prompts)
        params = pair_params(items, sampling_params, self.get_default_sampling_params)
        inputs = self.reader.read_all(
            items,
            truncations(tokenization_kwargs, params),
            add_special_tokens=adds_special_tokens(tokenization_kwargs),
        )
        return with_priorities(inputs, priority), params

    def beam_search(
        self,
        prompts: Any,
        params: BeamSearchParams,
        lora_request: Any = None,
        use_tqdm: bool = False,  # noqa: ARG002
        concurrency_limit: int | None = None,
    ) -> list[BeamSearchOutput]:
        """The best continuations of each prompt (as for :meth:`generate`), at most
        ``concurrency_limit`` prompts at a time. No bar is shown. Raises as :meth:`generate`."""
        refuse_unserved(lora_request)
        decode = None if self.tokenizer is None else self.tokenizer.decode
        ends, longest = self.factory.eos_token_ids, self.max_model_len
        searcher = BeamSearcher(self._loop.run, ends, longest, decode)
        inputs = self.reader.read_all(split_prompts(prompts))
        return searcher.search(inputs, params, concurrency_limit)

    def enqueue(
        self,
        prompts: Any,
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        lora_request: Any = None,
        priority: Sequence[int] | None = None,
        use_tqdm: UseTqdm = True,  # noqa: ARG002
        tokenization_kwargs: Mapping[str, Any] | None = None,
        mm_processor_kwargs: Mapping[str, Any] | None = None,
    ) -> list[str]:
        """Add prompts without computing them; :meth:`wait_for_completion` returns the results.

        Returns:
            The ids of the results, in the order of the prompts.

        Args, errors: those of :meth:`generate`. No bar is shown: reading the prompts is short.
        """
        refuse_unserved(lora_request, mm_processor_kwargs)
        inputs, params = self._read_all(prompts, sampling_params, priority, tokenization_kwargs)
        names = [str(next(self._enqueued)) for _ in inputs]
        self._stepwise.add_all(names, inputs, params)
        return names

    def wait_for_completion(
        self, output_type: Any = None, *, use_tqdm: UseTqdm = True
    ) -> list[RequestOutput]:
        """Compute the prompts of :meth:`enqueue`, and those added to ``llm_engine``, to their ends.
        Results are in the order of arrival.

        Args:
            output_type: vLLM's; RequestOutput or None.

        Raises:
            RequestError: one request failed. Another call returns the others.
            EngineError: a step failed, and all requests have ended.
        """
        if output_type not in (None, RequestOutput, (RequestOutput,)):
            raise InvalidInputError("output_type", output_type, "must be RequestOutput, or None")
        return self._stepwise.complete(use_tqdm)

    def get_default_sampling_params(self) -> SamplingParams:
        """New parameters with the defaults of the model's generation config: temperature, top_p,
        top_k, min_p, repetition_penalty and max_tokens.

        Raises:
            InvalidInputError: the generation config has a value that is refused.
        """
        try:
            return SamplingParams(**self.default_sampling)
        except InvalidInputError as error:
            limit = f"{error.limit}; generation_config = 'vllm' leaves the config out"
            name = f"generation_config.{error.field}"
            raise InvalidInputError(name, error.value, limit) from None

    def score(self, prompts: Any, *others: Any, use_tqdm: UseTqdm = True) -> list[ScoreOutput]:
        """The log-probability of each prompt token but the first, given the tokens before it. Each
        is the same float that ``logprobs`` of :class:`SamplingParams` gives for a sampled token.

        Args:
            prompts: as for ``generate``, but each may have ``max_model_len`` tokens.
            others: refused. vLLM's ``score(text, texts)`` runs a cross-encoder.

        Raises:
            TypeError: there is a second text.
        """
        if others:
            raise TypeError(
                "score() takes one argument, the prompts, and returns the log-probabilities of "
                "their tokens; vLLM's score(text, texts) of a cross-encoder is not supported"
            )
        inputs = self.reader.read_all(split_prompts(prompts), is_scored=True)
        return self._loop.score(inputs, use_tqdm)

    def chat(
        self,
        messages: Any,
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: UseTqdm = True,
        lora_request: Any = None,
        chat_template: str | None = None,
        chat_template_content_format: str = "auto",
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[dict[str, Any] | Callable[..., Any]] | None = None,
        chat_template_kwargs: dict[str, Any] | None = None,
        tokenization_kwargs: Mapping[str, Any] | None = None,
        mm_processor_kwargs: Mapping[str, Any] | None = None,
        *,
        priority: Sequence[int] | None = None,
        stop_in_reasoning: bool = False,
        prediction: Any = None,
    ) -> list[RequestOutput]:
        """Answer a conversation, or each of a list of conversations, with the model's chat
        template. Each answer has a ``message`` with its content, reasoning and tool calls.

        ``use_tqdm``, ``lora_request``, ``priority``, ``tokenization_kwargs`` (without
        ``add_special_tokens``) and ``mm_processor_kwargs`` are those of :meth:`generate`.

        Args:
            messages: a list of ``{"role": ..., "content": ...}``, or a list of such lists. The
                ``message`` of an earlier answer can be an item.
            tools: functions that the model may call: OpenAI's dicts, or Python
                functions with type hints and a docstring.
            chat_template: a Jinja template that replaces the model's.
            chat_template_content_format: "auto": content is converted to the form that the
                template reads. vLLM's other values are refused.
            add_generation_prompt: append the opening of an assistant message to the prompt.
            continue_final_message: continue the last message; requires
                ``add_generation_prompt=False``.
            chat_template_kwargs: more template variables, such as ``{"enable_thinking": False}``.
            stop_in_reasoning: apply stop strings inside the reasoning too; by default they apply
                to the content only.
            prediction: the expected answer: a text, or one per conversation in a list. A hint that
                never changes the answer, used with ``speculative_config``.
        """
        refuse_unserved(lora_request, mm_processor_kwargs, chat_template_content_format)
        is_many = is_list(messages) and bool(messages) and is_list(messages[0])
        conversations = list(messages) if is_many else [messages]
        params = pair_params(conversations, sampling_params, self.get_default_sampling_params)
        truncate = truncations(tokenization_kwargs, params)
        adds_special_tokens(tokenization_kwargs, in_template=True)
        schemas = read_tools(tools)
        is_listed = is_many and is_list(prediction)
        predictions = list(prediction) if is_listed else [prediction] * len(conversations)
        if len(predictions) != len(conversations):
            limit = f"{len(predictions)} given for {len(conversations)} conversations"
            raise InvalidInputError("prediction", prediction, limit)
        inputs = [
            self.chat_reader.read(
                item,
                tools=schemas,
                chat_template=chat_template,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                chat_template_kwargs=chat_template_kwargs,
                stop_in_reasoning=stop_in_reasoning,
                truncate=truncate[i],
                field=f"messages[{i}]" if is_many else "messages",
            )
            for i, item in enumerate(conversations)
        ]
        for i, given in enumerate(predictions if prediction is not None else ()):
            inputs[i] = replace(inputs[i], prediction=self.reader.read_prediction(given))
        inputs = with_priorities(inputs, priority)
        outputs = self._loop.run(inputs, params, use_tqdm)
        for output, prompt, its_params in zip(outputs, inputs, params, strict=True):
            for answer in output.outputs if its_params.detokenize else ():
                reader = self.chat_reader.reader(
                    prompt,
                    its_params,
                    tools=schemas,
                    chat_template=chat_template,
                    request_id=output.request_id,
                    index=answer.index,
                )
                answer.message = read_response(reader, answer.token_ids)
        return outputs

    def generate_iter(
        self,
        items: Iterable[tuple[Any, SamplingParams] | InvalidInputError],
        *,
        window: int | None = None,
    ) -> Iterator[RequestOutput | PagespecError]:
        """Continue a stream of (prompt, parameters), lazily and in order.

        A prompt may also be a ``PromptInput`` (see ``read_messages``). A refused item yields its
        error in place of an output, and the other items continue. An item that is an
        InvalidInputError is yielded unchanged.

        Args:
            window: maximum number of items that are read but not yet yielded; 1 serves one item at
                a time. Default: four times ``max_num_seqs``.

        Raises:
            InvalidInputError: ``window`` is not an integer >= 1, or ``items`` is not iterable.
            EngineError: a step failed, in this iterator or in a concurrent call.
        """
        if window is None:
            window = 4 * self.config.max_num_seqs
        if not is_int(window) or window < 1:
            raise InvalidInputError("window", window, "must be an integer of 1 or more, or None")
        return self._loop.iterate(items, self._read, window)

    def read_messages(self, messages: Any) -> PromptInput:
        """Convert a conversation to a prompt for ``generate_iter`` and ``stream``. To pass tools
        or other arguments of ``chat``, call ``chat_reader.read``."""
        return self.chat_reader.read(messages)

    def stream(self, prompt: Any, sampling_params: SamplingParams | None = None) -> Iterator[str]:
        """Yield the text of one answer as it grows. The pieces, joined, equal the text of
        ``generate``. Closing the iterator aborts the request.

        Args:
            prompt: one prompt as for ``generate``, or a ``PromptInput``.

        Raises:
            InvalidInputError: the prompt or a parameter is refused; ``n`` must be 1.
        """
        if isinstance(sampling_params, SamplingParams) and sampling_params.n > 1:
            raise InvalidInputError("n", sampling_params.n, "must be 1 here: see stream_all")
        return only_text(self.stream_all(prompt, sampling_params))

    def stream_message(
        self, messages: Any, sampling_params: SamplingParams | None = None
    ) -> Iterator[Delta]:
        """Yield the answer to a conversation as it grows: reasoning and content, split as in
        ``chat``. Tool calls are yielded as content. Closing the iterator aborts the request.

        Args:
            messages: one conversation, as for ``chat``.

        Raises:
            InvalidInputError: the conversation or a parameter is refused; ``n`` must be 1.
        """
        params = self._or_default(sampling_params)
        prompt = self.chat_reader.read(messages, truncate=truncation_of(params))
        reader = self.chat_reader.reader(prompt, params, tool_choice="none")
        return stream_deltas(reader, self._loop.stream_tokens(prompt, params))

    def stream_all(
        self, prompt: Any, sampling_params: SamplingParams | None = None
    ) -> Generator[tuple[int, str]]:
        """Yield the texts of all ``n`` answers as they grow, as (answer index, piece). Closing the
        iterator aborts all of them.

        Args:
            prompt: one prompt as for ``generate``, or a ``PromptInput``.
        """
        if self.tokenizer is None:
            raise InvalidInputError("prompt", prompt, "this model has no tokenizer: no text")
        params = self._or_default(sampling_params)
        return self._loop.stream(self._read(prompt, params), params, self.tokenizer)

    def _or_default(self, params: SamplingParams | None) -> SamplingParams:
        return self.get_default_sampling_params() if params is None else params

    def _read(self, prompt: Any, params: Any) -> PromptInput:
        return self.reader.read_or_keep(prompt, truncate=truncation_of(params))

    def reset_prefix_cache(
        self, reset_running_requests: bool = True, reset_connector: bool = False
    ) -> bool:
        """Empty the prefix cache, for example after a change of the weights: see
        ``LLMEngine.reset_prefix_cache``."""
        return self.llm_engine.reset_prefix_cache(reset_running_requests, reset_connector)

    def get_world_size(self, include_dp: bool = True) -> int:  # noqa: ARG002
        """The number of ranks; ``include_dp`` is vLLM's: there is one data-parallel rank."""
        return self.config.tensor_parallel_size

    def get_metrics(self) -> list[Metric]:
        """Metrics under vLLM's names: the scheduler's, and those of the requests whose results
        these methods have returned. Those of ``AsyncLLM`` are at ``/metrics`` of its server, as are
        times between tokens and the sizes of steps, which only the server observes."""
        return self.llm_engine.get_metrics()

    def stats(self) -> EngineStats:
        """A snapshot of counters, start-up times and memory use."""
        from .kernels.device import count_triton_variants, peak_memory_bytes

        engine, runner = self.engine, self._runner
        return replace(
            self._startup,
            **engine.scheduler.draft_counts.copied(),
            num_compilations=self._startup.num_compilations + count_triton_variants(),
            num_steps=engine.scheduler.num_steps,
            memory_bytes=self._startup.memory_bytes | peak_memory_bytes(self._device),
            host_s={
                "schedule": engine.schedule_s,
                "pack": runner.pack_s,
                "commit": engine.commit_s,
                "masks": runner.mask_s,
                "wait": runner.wait_s,
            },
        )
