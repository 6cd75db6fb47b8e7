"""``LLM``: offline inference, the class people import. Names as in vLLM where meanings agree."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from .chat.formats import check_formats
from .chat.messages import read_tools
from .chat.reader import ChatReader
from .chat.response import read_response, stream_deltas
from .engine.block_manager import BlockManager
from .engine.config import EngineConfig, check_objects
from .engine.core import Engine
from .engine.generation import GenerationLoop, only_text
from .engine.inputs import (
    PromptInput,
    PromptReader,
    pair_params,
    split_prompts,
    truncation_of,
)
from .engine.outputs import RequestOutput, ScoreOutput
from .engine.pace import StepPace
from .engine.policy import Policy
from .engine.request_factory import RequestFactory
from .engine.sampling_params import SamplingParams
from .engine.scheduler import Scheduler
from .engine.stats import EngineStats
from .errors import InvalidInputError, PagespecError
from .model_name import check_model_name
from .startup import create_cuda_context_async, gc_paused
from .validation import is_int, is_list, path_of

if TYPE_CHECKING:
    import os

    from transformers import PreTrainedModel

    from .build import BuiltEngine
    from .chat.deltas import Delta


def import_engine(
    device: str = "auto", num_ranks: int = 1, model: object = None
) -> Callable[..., BuiltEngine]:
    """:func:`pagespec.build.build`. It comes with torch and transformers, which takes
    seconds, so it is imported late, and everything before works without them.

    Args:
        device: of the engine to be built; if it may be a GPU, that is opened meanwhile.
        model: to be loaded; the path or name of one that is not there is refused before.

    Raises:
        InvalidInputError, UnsupportedModelError: there is no such model.
    """
    name = path_of(model)
    if name is not None:
        check_model_name(name)
    create_cuda_context_async(device)
    with gc_paused():
        if num_ranks > 1:
            from .distributed.launch import build_distributed

            return build_distributed
        from .build import build
    return build


class LLM:
    """A loaded model, its KV cache and the engine that serves requests from them.

    Threads may share it: what they ask for is computed together. A failed step, or an interrupt
    such as Ctrl-C in one, ends every request that is being served, also those of other calls, which
    raise EngineError; the next call is served as ever, with an empty prefix cache. Of several ranks
    (``tensor_parallel_size``) the loss of one is the end of the engine: make a new one.

    Args:
        model: a local folder, a hub id, a GGUF file, or a ``transformers`` causal language model
            already in memory (used in place: it is moved to the device and put in evaluation
            mode, and weights of products that read one input are laid together).
        dtype: "float32", "bfloat16", "float16", or "auto": float32 on a CPU, the model's own on a
            GPU; a model in memory keeps its own.
        device: "auto" (a GPU if there is one), "cpu", "cuda", "cuda:N".
        max_model_len: most tokens of prompt plus output a request may have; None takes the
            model's own limit, or what the KV cache holds if that is less. A model whose config
            names no limit (BLOOM, recurrent ones) needs it.
        max_num_seqs: most requests running at a time; each of ``n`` continuations is one.
        max_num_batched_tokens: most tokens computed in a step; at least ``max_num_seqs``; default
            2,048, on a GPU 8,192.
        max_inter_token_ms: longest that a step should take which computes a prompt beside running
            answers, in milliseconds; long prompts are cut into as many steps as that takes. 0: no
            bound. Default 500 on a CPU, no bound on a GPU.
        block_size: tokens in a KV block.
        num_blocks: KV blocks; None sizes the cache from memory.
        memory_utilization: share of a GPU's memory that may be in use in all: by other processes,
            weights, steps, graphs and KV cache; default 0.9. On a CPU the share of the memory
            available now that the KV cache takes; default half of it, at most 4 GiB. Give this or
            ``num_blocks``.
        gpu_memory_utilization: vLLM's name of ``memory_utilization``.
        enable_prefix_caching: reuse KV blocks of equal prompt prefixes.
        state_interval: tokens between the checkpoints of recurrent layers' states that prefix hits
            begin at; a multiple of ``block_size``, default 256. Only of models with such layers.
        num_state_slots: states that are held at a time, of running requests and checkpoints; more
            than ``max_num_seqs``, default twice that and one more, if they fit.
        compile: "graph" runs the captured graph after our passes; "inductor" compiles what lies
            between its products and kernels (on CPU this needs a C++ compiler); "eager" runs the
            model without capturing it. "auto" is "inductor" on a GPU, "graph" on a CPU.
        attention: "triton", "flash" (a FlashAttention library), "reference", or "auto": what
            suits the device.
        transparent: a request's tokens and logits are the same to the bit whatever else runs;
            False lets kernels follow the batch.
        overlap: plan and queue a step while the one before computes; default on a GPU.
        graph_batch_sizes: batch sizes of decode steps to capture as CUDA graphs; None for a list
            up to ``max_num_seqs``, an empty one for no graphs. Only on a GPU.
        policy: order of service: "fcfs"; "fair" shares among owners, which a prompt's dict gives
            (see ``generate``), first come first served within each; "shortest_first", which counts
            prompt and ``max_tokens``; or "priority", which a prompt's dict gives.
        seed: seed of the requests that bring none of their own.
        load_format: "auto", or "dummy" for random weights from the config alone.
        logprobs_mode: what ``logprobs`` of sampled tokens are of: "raw_logprobs", the model's own
            distribution; "processed_logprobs", the one that was sampled from, after edits,
            temperature, top_k, top_p and min_p (of a greedy request at temperature 1, all kept).
            Those of prompts are raw.
        quantization: on a CPU or a Hopper GPU. "gguf" keeps what a GGUF file holds quantised:
            weights in 4 bits, and others in 8 bits or a float format; "fp8" makes linear layers
            e4m3 as they are loaded. Logits are then near those of the plain model, not equal to
            them. None does what the checkpoint says: layers that it holds in FP8, or in 4 bits by
            AWQ, GPTQ or compressed-tensors, stay so (docs/quantization.md), and a GGUF file is
            expanded.
        kv_cache_dtype: "auto" is the model's; "fp8" holds keys and values in e4m3 with a scale for
            each token and head, in a quarter of float32's memory, half of bfloat16's. A GPU needs
            compute capability 8.9.
        mla_latent_cache: of models with multi-head latent attention, cache the latent vector of a
            token in place of the keys and values of every head (docs/attention.md).
        generation_config: where the default sampling parameters come from: "auto", the model's
            generation config; "vllm", none, so they are those of ``SamplingParams``; or a folder
            with a generation_config.json. The model's end tokens are its own in any case.
        threads: threads that this engine computes with on a CPU. None: of the numbers up to
            torch's own, the cores and their quota, the quickest, measured at start and between
            steps (docs/linear.md); no answer depends on which of them is used when.
        tensor_parallel_size: processes, on a GPU each, that share the model's weights and its cache
            (tensor parallelism). This process is the first, the others are started.
        tool_call_format: how the model writes tool calls: a name of docs/chat.md, or "none".
            "auto": as its chat template shows.
        reasoning_format: how the model writes reasoning, likewise.
        trace: file to write the step trace to, for ``pagespec trace check`` to replay.
        check_invariants: check the scheduler's structural properties after every step (slow).
        on_logits: called when a step is dispatched, with its plan and its logits
            ``[num_sampled, vocab_size]``, which the next step overwrites: clone what is to be kept.

    Raises:
        InvalidInputError: an argument is outside its limits.
        UnsupportedModelError: the model needs something this engine does not compute exactly.
    """

    def __init__(
        self,
        model: str | os.PathLike[str] | PreTrainedModel,
        *,
        dtype: str = "auto",
        device: str = "auto",
        max_model_len: int | None = None,
        max_num_seqs: int = 64,
        max_num_batched_tokens: int | None = None,
        max_inter_token_ms: float | None = None,
        block_size: int = 16,
        num_blocks: int | None = None,
        memory_utilization: float | None = None,
        gpu_memory_utilization: float | None = None,
        enable_prefix_caching: bool = True,
        state_interval: int | None = None,
        num_state_slots: int | None = None,
        compile: str = "auto",
        attention: str = "auto",
        transparent: bool = True,
        overlap: bool | None = None,
        graph_batch_sizes: Sequence[int] | None = None,
        policy: str = "fcfs",
        seed: int = 0,
        load_format: str = "auto",
        logprobs_mode: str = "raw_logprobs",
        tensor_parallel_size: int = 1,
        quantization: str | None = None,
        kv_cache_dtype: str = "auto",
        mla_latent_cache: bool = True,
        generation_config: str | os.PathLike[str] = "auto",
        tool_call_format: str = "auto",
        reasoning_format: str = "auto",
        threads: int | None = None,
        trace: str | os.PathLike[str] | None = None,
        check_invariants: bool = False,
        on_logits: Callable[..., None] | None = None,
    ) -> None:
        if gpu_memory_utilization is not None:
            if memory_utilization is not None:
                limit = "is another name of memory_utilization; give one of them"
                raise InvalidInputError("gpu_memory_utilization", gpu_memory_utilization, limit)
            memory_utilization = gpu_memory_utilization
        check_formats(tool_call_format, reasoning_format)
        check_objects(
            model=model, trace=trace, check_invariants=check_invariants, on_logits=on_logits
        )
        config = EngineConfig(
            dtype=dtype,
            device=device,
            max_model_len=max_model_len,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            max_inter_token_ms=max_inter_token_ms,
            block_size=block_size,
            num_blocks=num_blocks,
            memory_utilization=memory_utilization,
            enable_prefix_caching=enable_prefix_caching,
            state_interval=state_interval,
            num_state_slots=num_state_slots,
            compile=compile,
            attention=attention,
            transparent=transparent,
            overlap=overlap,
            graph_batch_sizes=graph_batch_sizes,
            policy=policy,
            seed=seed,
            load_format=load_format,
            logprobs_mode=logprobs_mode,
            tensor_parallel_size=tensor_parallel_size,
            quantization=quantization,
            kv_cache_dtype=kv_cache_dtype,
            mla_latent_cache=mla_latent_cache,
            generation_config=generation_config,  # type: ignore[arg-type]
            threads=threads,
        )
        build = import_engine(config.device, config.tensor_parallel_size, model)
        built = build(model, config, on_logits)
        config = self.config = built.config
        self._startup = built.stats
        self.tokenizer = built.tokenizer
        self.max_model_len = built.max_model_len
        self.num_blocks = built.num_blocks
        self.device = str(built.device)
        self._device = built.device
        self._runner = built.runner
        self.default_sampling = dict(built.default_sampling)
        self.reader = PromptReader(built.tokenizer, built.vocab_size, built.max_model_len)
        self.chat_reader = ChatReader(
            self.reader,
            built.tokenizer,
            eos_token_ids=frozenset(built.eos_token_ids),
            tool_call_format=tool_call_format,
            reasoning_format=reasoning_format,
        )
        self.factory = RequestFactory(
            built.tokenizer,
            vocab_size=built.vocab_size,
            eos_token_ids=frozenset(built.eos_token_ids),
            max_model_len=built.max_model_len,
            seed=config.seed,
            can_score=built.can_score,
            encode=self.reader.encode,
            structures=built.grammars,
        )
        scheduler = Scheduler(
            BlockManager(
                built.num_blocks,
                config.block_size,
                enable_prefix_caching=config.enable_prefix_caching,
                num_state_slots=built.num_state_slots,
                state_interval=built.state_interval,
            ),
            max_num_seqs=config.max_num_seqs,
            max_num_batched_tokens=config.num_tokens_a_step,
            pipeline_depth=built.runner.pipeline_depth,
            policy=Policy(config.policy),
        )
        target_s = config.max_inter_token_s(built.device.type)
        self.engine = Engine(
            scheduler,
            built.runner,
            pace=StepPace(target_s) if target_s else None,
            trace=trace,
            check_invariants=check_invariants,
        )
        self._loop = GenerationLoop(self.engine, self.factory)

    # Offline generation -----------------------------------------------------------------------

    def generate(
        self,
        prompts: Any,
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Continue each prompt. Results come in the order of the prompts.

        Args:
            prompts: a text, a list of token ids, a dict ``{"prompt": text}`` or
                ``{"prompt_token_ids": [...]}``, or a list of those. A dict may also have
                ``"cache_salt"``, text: the prefix cache is not shared across salts; and
                ``"priority"``, 0 (the most urgent, default) to 256: under ``policy="priority"``
                one of p lets those of 0 among the next 16 p arrivals go first; and ``"owner"``,
                text: under ``policy="fair"`` owners have equal shares.
            sampling_params: one for all, or one a prompt; by default those of
                :meth:`get_default_sampling_params`.
            use_tqdm: show a progress bar on stderr.

        Raises:
            InvalidInputError: some prompt or parameter is refused; none is served.
            EngineError: a step failed, or one that another call took.
        """
        items = split_prompts(prompts)
        params = pair_params(items, sampling_params, self.get_default_sampling_params)
        return self._loop.run(
            self.reader.read_all(items, [truncation_of(p) for p in params]), params, use_tqdm
        )

    def get_default_sampling_params(self) -> SamplingParams:
        """New ones with what the generation config asks for: temperature, top-p, top-k, min-p,
        repetition penalty and the number of new tokens.

        Raises:
            InvalidInputError: a value there is refused.
        """
        try:
            return SamplingParams(**self.default_sampling)
        except InvalidInputError as error:
            limit = f"{error.limit}; generation_config = 'vllm' leaves the config out"
            name = f"generation_config.{error.field}"
            raise InvalidInputError(name, error.value, limit) from None

    def score(self, prompts: Any, *, use_tqdm: bool = True) -> list[ScoreOutput]:
        """The log-probability of each token of each prompt but the first, given those before it:
        the same float that ``logprobs`` of :class:`SamplingParams` gives when it is sampled there.

        Args:
            prompts: as of ``generate``, but each may have ``max_model_len`` tokens.
        """
        inputs = self.reader.read_all(split_prompts(prompts), is_scored=True)
        return self._loop.score(inputs, use_tqdm)

    def chat(
        self,
        messages: Any,
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
        tools: Sequence[dict[str, Any] | Callable[..., Any]] | None = None,
        chat_template: str | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        chat_template_kwargs: dict[str, Any] | None = None,
        stop_in_reasoning: bool = False,
    ) -> list[RequestOutput]:
        """Answer a conversation, or each of a list of conversations, through the model's chat
        template. Each answer has a ``message`` with its content, reasoning and tool calls.

        Args:
            messages: a list of ``{"role": ..., "content": ...}``, or a list of such lists; an
                answer's ``message`` may be one of them.
            tools: functions that the model may ask to be called: OpenAI's dicts, or Python
                functions with hints and a docstring.
            chat_template: Jinja text in place of the model's.
            add_generation_prompt: end the prompt with the beginning of an answer.
            continue_final_message: have the last message continued, which needs
                ``add_generation_prompt=False``.
            chat_template_kwargs: more variables of the template, as ``{"enable_thinking": False}``.
            stop_in_reasoning: stop strings end an answer inside its reasoning, too; otherwise they
                count from where the content begins.
        """
        is_many = is_list(messages) and bool(messages) and is_list(messages[0])
        conversations = list(messages) if is_many else [messages]
        params = pair_params(conversations, sampling_params, self.get_default_sampling_params)
        schemas = read_tools(tools)
        inputs = [
            self.chat_reader.read(
                item,
                tools=schemas,
                chat_template=chat_template,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                chat_template_kwargs=chat_template_kwargs,
                stop_in_reasoning=stop_in_reasoning,
                truncate=truncation_of(params[i]),
                field=f"messages[{i}]" if is_many else "messages",
            )
            for i, item in enumerate(conversations)
        ]
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
        items: Iterable[tuple[Any, SamplingParams]],
        *,
        window: int | None = None,
    ) -> Iterator[RequestOutput | PagespecError]:
        """Continue a stream of (prompt, parameters), lazily and in order.

        A prompt may also be a ``PromptInput`` (see ``read_messages``). A refused item yields its
        error in its place and the others go on.

        Args:
            window: how many items are read and not yet yielded at most, so 1 serves one at a
                time; default four times ``max_num_seqs``.

        Raises:
            InvalidInputError: ``window`` is no integer of 1 or more, or ``items`` no iterable.
            EngineError: a step failed, or one that another call took (by the iterator).
        """
        if window is None:
            window = 4 * self.config.max_num_seqs
        if not is_int(window) or window < 1:
            raise InvalidInputError("window", window, "must be an integer of 1 or more, or None")
        return self._loop.iterate(items, self._read, window)

    def read_messages(self, messages: Any) -> PromptInput:
        """A conversation as a prompt for ``generate_iter`` and ``stream``; ``chat_reader.read``
        takes tools and the other arguments of ``chat`` as well."""
        return self.chat_reader.read(messages)

    def stream(self, prompt: Any, sampling_params: SamplingParams | None = None) -> Iterator[str]:
        """Yield the text of one answer as it grows; the pieces together are the text of
        ``generate``. Closing the iterator aborts the request.

        Args:
            prompt: as one item of ``generate``, or a ``PromptInput``.

        Raises:
            InvalidInputError: the prompt or a parameter is refused; ``n`` must be 1.
        """
        if isinstance(sampling_params, SamplingParams) and sampling_params.n > 1:
            raise InvalidInputError("n", sampling_params.n, "must be 1 here: see stream_all")
        return only_text(self.stream_all(prompt, sampling_params))

    def stream_message(
        self, messages: Any, sampling_params: SamplingParams | None = None
    ) -> Iterator[Delta]:
        """Yield the answer to a conversation as it grows: reasoning and content, as ``chat`` reads
        them. Tool calls are content. Closing the iterator aborts the request.

        Args:
            messages: one conversation, as of ``chat``.

        Raises:
            InvalidInputError: the conversation or a parameter is refused; ``n`` must be 1.
        """
        params = sampling_params
        if params is None:
            params = self.get_default_sampling_params()
        prompt = self.chat_reader.read(messages, truncate=truncation_of(params))
        reader = self.chat_reader.reader(prompt, params, tool_choice="none")
        return stream_deltas(reader, self._loop.stream_tokens(prompt, params))

    def stream_all(
        self, prompt: Any, sampling_params: SamplingParams | None = None
    ) -> Generator[tuple[int, str]]:
        """Yield the texts of all ``n`` answers as they grow: (index of the answer, piece). Closing
        the iterator aborts all of them.

        Args:
            prompt: as one item of ``generate``, or a ``PromptInput``.
        """
        if self.tokenizer is None:
            raise InvalidInputError("prompt", prompt, "this model has no tokenizer: no text")
        params = sampling_params
        if params is None:
            params = self.get_default_sampling_params()
        return self._loop.stream(self._read(prompt, params), params, self.tokenizer)

    def _read(self, prompt: Any, params: Any) -> PromptInput:
        truncate = truncation_of(params)
        if isinstance(prompt, PromptInput):
            return self.reader.truncated(prompt, truncate)
        return self.reader.read(prompt, truncate=truncate)

    def reset_prefix_cache(self) -> bool:
        """Forget all that the KV cache holds, as after a change of the weights; always True. vLLM's
        fails while requests are being served: here they go on, but compute their tokens so far
        again.

        Raises:
            EngineError: a step in flight failed.
        """
        self.engine.reset_prefix_cache()
        return True

    def stats(self) -> EngineStats:
        """Counters, start-up times and memory as they are now."""
        from .kernels.jit.counters import count_triton_variants, peak_memory_bytes

        engine, runner = self.engine, self._runner
        return replace(
            self._startup,
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
