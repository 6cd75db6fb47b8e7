"""The scheduler step by step, without a model, each step explained: python examples/step_by_hand.py

Three requests share six KV blocks of four tokens. A step computes at most eight tokens. Prompt b is
longer than the rest of a step's budget, so it is computed in chunks. The first block of prompt c is
in the prefix cache. Later the pool is full: c, the youngest, is preempted and then admitted again.
"""

from __future__ import annotations

from pagespec import SamplingParams
from pagespec.engine.block_manager import BlockManager
from pagespec.engine.plan import StepPlan, StepResult
from pagespec.engine.planner import PlanAccount
from pagespec.engine.request import Request
from pagespec.engine.scheduler import Scheduler

NUM_BLOCKS, BLOCK_SIZE, BUDGET = 6, 4, 8
PROMPTS = {"a": [1, 2, 3, 4, 5], "b": list(range(10, 19)), "c": [1, 2, 3, 4, 6]}
NUM_OUTPUT_TOKENS = 6
WHY_REFUSED = {  # reasons of the planner for a request without a row
    "blocks": "too few blocks are free",
    "budget": "the token budget of the step is spent",
    "closed": "an older request is short of blocks",
    "preempting": "a step that preempts admits no request",
    "ending": "its last token is being sampled",
}


class AddingRunner:
    """Implements ``pagespec.engine.runner.Runner`` without a model. The KV cache stores a token id
    per slot, and the next token is the sum of all slots that a row reads through its block table.
    A wrong block table would change the answer."""

    pipeline_depth = max_draft_tokens = 0

    def __init__(self) -> None:
        self.cache = [0] * (NUM_BLOCKS * BLOCK_SIZE)
        self.reset()

    def reset(self) -> None:
        self.tables: dict[str, list[int]] = {}
        self.sampled: list[int] = []  # by the previous step

    def dispatch(self, plan: StepPlan) -> list[int]:
        for request_id in plan.released:
            self.tables.pop(request_id, None)
        for row, blocks in plan.tables.items():  # whole tables of rows admitted in this step
            self.tables[plan.requests[row].request_id] = list(blocks)
        for row, blocks in plan.new_blocks.items():  # blocks appended to the tables of other rows
            self.tables[plan.requests[row].request_id] += blocks
        # -(j + 1) is a placeholder for the j-th token that the previous step sampled.
        token_ids = iter([t if t >= 0 else self.sampled[-1 - t] for t in plan.token_ids])
        self.sampled = []
        for request, start, num_tokens, num_samples in plan.rows():
            table, size = self.tables[request.request_id], BLOCK_SIZE
            slots = [table[p // size] * size + p % size for p in range(start + num_tokens)]
            for slot in slots[start:]:
                self.cache[slot] = next(token_ids)
            if num_samples:  # 1: there are no draft tokens
                self.sampled.append(sum(self.cache[slot] for slot in slots) % 1000)
        return self.sampled

    def collect(self, handle: object) -> StepResult:
        assert isinstance(handle, list)
        return StepResult(handle)


def explain(plan: StepPlan, account: PlanAccount, known: set[str]) -> list[str]:
    """Sentences that say what the plan does and why. ``known``: requests admitted earlier."""
    said = []
    for victim, asker in zip(plan.preempted, account.preempted_for, strict=True):
        said.append(
            f"{asker} needs a block and none is free. {victim.request_id} is younger and is "
            f"preempted for {asker}: {victim.request_id} gives its blocks back and waits."
        )
    for row, (request, start, num_tokens, num_samples) in enumerate(plan.rows()):
        name, num_prompt = request.request_id, request.num_prompt_tokens
        if row in plan.tables:
            again = " again" if name in known else ""
            hit = f"; prefix hit of {start} tokens in block {plan.tables[row][0]}" if start else ""
            said.append(f"{name} is admitted{again}{hit}.")
            known.add(name)
        if not num_samples:
            said.append(
                f"{name} computes a chunk of {num_tokens} of its {num_prompt} prompt tokens: "
                f"the budget is {BUDGET} tokens per step. A chunk samples no token."
            )
        elif start < num_prompt < start + num_tokens:
            what = f"{num_tokens} tokens, old output tokens included"
            said.append(f"{name} computes {what}, because the preemption freed their KV blocks.")
        elif start + num_tokens == num_prompt:
            rest = "the rest of its prompt" if start else "its whole prompt"
            said.append(f"{name} computes {rest} and samples its first token.")
    decoding = [r.request_id for r, start, *_ in plan.rows() if start >= r.num_prompt_tokens]
    if decoding:
        verb = "decode" if len(decoding) > 1 else "decodes"
        said.append(f"{', '.join(decoding)} {verb} (one token per step).")
    for name, reason in account.refused:
        said.append(f"{name} has no row: {WHY_REFUSED.get(reason, reason)}.")
    if min(plan.token_ids) < 0:
        said.append(
            f"Step {plan.step - 1} had the same batch. Token id -1 is a placeholder for the first "
            "token which that step sampled, -2 for the second. A GPU has them in its own memory."
        )
    return said


def print_table(plan: StepPlan, runner: AddingRunner) -> None:
    """One line per row. ``blocks`` is the block table, with blocks allocated in this step as +5."""
    print(f"  {'row':5}{'positions':11}{'token ids':22}{'blocks':13}sampled")
    token_ids, sampled = list(plan.token_ids), iter(runner.sampled)
    for row, (request, start, num_tokens, num_samples) in enumerate(plan.rows()):
        ids = " ".join(map(str, token_ids[:num_tokens]))
        del token_ids[:num_tokens]
        new = plan.new_blocks.get(row, plan.tables.get(row, ())[start // BLOCK_SIZE :])
        table = runner.tables[request.request_id]
        blocks = " ".join(f"+{block}" if block in new else str(block) for block in table)
        positions = f"{start}..{start + num_tokens - 1}" if num_tokens > 1 else str(start)
        token = next(sampled) if num_samples else "-"
        print(f"  {request.request_id:5}{positions:11}{ids:22}{blocks:13}{token}")


def main() -> None:
    runner = AddingRunner()
    scheduler = Scheduler(
        BlockManager(NUM_BLOCKS, BLOCK_SIZE), max_num_seqs=3, max_num_batched_tokens=BUDGET
    )
    scheduler.account = account = PlanAccount()  # the planner writes its reasons here
    for name, prompt in PROMPTS.items():
        max_num_tokens = len(prompt) + NUM_OUTPUT_TOKENS
        scheduler.add(Request(name, prompt, SamplingParams(), max_num_tokens=max_num_tokens))
    known: set[str] = set()
    while scheduler.has_work:
        plan = scheduler.schedule()  # decides
        result = runner.collect(runner.dispatch(plan))  # computes
        print(f"step {plan.step}")
        for sentence in explain(plan, account, known):
            print(f"  {sentence}")
        print_table(plan, runner)
        for request in scheduler.commit(plan, result.token_ids):  # settles
            print(f"  {request.request_id} finished: {request.output_token_ids}", end=" ")
            print(f"({request.finish_reason}); its blocks are free or cached from now on")
        print()


if __name__ == "__main__":
    main()
