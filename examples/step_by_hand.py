"""The scheduler step by step, without a model: schedule, dispatch, commit, and what the plans say.

python examples/step_by_hand.py

Three requests share six blocks of four tokens, with at most eight tokens per step. The second
prompt is cut into chunks; the third finds its first block in the prefix cache; when the blocks run
out it is preempted, and later begins again.
"""

from __future__ import annotations

from pagespec import SamplingParams
from pagespec.engine.block_manager import BlockManager
from pagespec.engine.plan import StepPlan, StepResult
from pagespec.engine.request import Request
from pagespec.engine.scheduler import Scheduler


class AddingRunner:
    """Meets ``pagespec.engine.runner.Runner``. Its KV cache keeps the token written to each slot,
    and the next token is the sum of all that a row reads through its block table: with one wrong
    block the answer would be another."""

    pipeline_depth = max_draft_tokens = 0

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.block_size = block_size
        self.cache = [0] * (num_blocks * block_size)
        self.reset()

    def reset(self) -> None:
        self.tables: dict[str, list[int]] = {}
        self.sampled: list[int] = []  # by the step before

    def dispatch(self, plan: StepPlan) -> list[int]:
        for request_id in plan.released:
            self.tables.pop(request_id, None)
        for row, blocks in plan.tables.items():  # whole tables, of rows admitted in this step
            self.tables[plan.requests[row].request_id] = list(blocks)
        for row, blocks in plan.new_blocks.items():  # what the tables of other rows grew by
            self.tables[plan.requests[row].request_id] += blocks
        # -(j + 1) is the j-th token that the step before sampled: a GPU knows it before the host.
        token_ids = iter([t if t >= 0 else self.sampled[-1 - t] for t in plan.token_ids])
        self.sampled = []
        for request, start, num_tokens, num_samples in plan.rows():
            table, size = self.tables[request.request_id], self.block_size
            slots = [table[p // size] * size + p % size for p in range(start + num_tokens)]
            for slot in slots[start:]:
                self.cache[slot] = next(token_ids)
            if num_samples:  # 1: there are no draft tokens
                self.sampled.append(sum(self.cache[slot] for slot in slots) % 1000)
        return self.sampled

    def collect(self, handle: object) -> StepResult:
        assert isinstance(handle, list)
        return StepResult(handle)


def print_plan(plan: StepPlan) -> None:
    print(f"step {plan.step}: token_ids {list(plan.token_ids)}")
    for request, start, num_tokens, num_samples in plan.rows():
        sample = ", samples" if num_samples else ""
        print(f"  row {request.request_id}: positions {start}..{start + num_tokens - 1}{sample}")
    preempted = [request.request_id for request in plan.preempted]
    print(f"  tables {plan.tables}, new_blocks {plan.new_blocks}")
    print(f"  released {list(plan.released)}, preempted {preempted}")


def main() -> None:
    runner = AddingRunner(num_blocks=6, block_size=4)
    scheduler = Scheduler(BlockManager(6, 4), max_num_seqs=3, max_num_batched_tokens=8)
    prompts = {
        "a": [1, 2, 3, 4, 5],
        "b": list(range(10, 19)),
        "c": [1, 2, 3, 4, 6],
    }
    for name, prompt in prompts.items():
        scheduler.add(Request(name, prompt, SamplingParams(), max_num_tokens=len(prompt) + 6))
    while scheduler.has_work:
        plan = scheduler.schedule()
        print_plan(plan)
        result = runner.collect(runner.dispatch(plan))
        for request in scheduler.commit(plan, result.token_ids):
            answer = request.token_ids[request.num_prompt_tokens :]
            print(f"  finished {request.request_id}: {answer} ({request.finish_reason})")


if __name__ == "__main__":
    main()
