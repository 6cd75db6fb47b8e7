"""Four scheduling policies on one workload, without a model: python examples/policies.py

Eight documents of 960 tokens arrive first. Sixteen questions of 32 tokens follow, one every three
steps. The wait of a request is the number of steps from its arrival to its first token.
"""

from __future__ import annotations

from statistics import mean

from pagespec import SamplingParams
from pagespec.engine.block_manager import BlockManager
from pagespec.engine.policy import MAX_OVERTAKES, Policy
from pagespec.engine.request import Request
from pagespec.engine.scheduler import Scheduler

# (step of arrival, owner, prompt tokens, output tokens, priority: 0 is the most urgent)
DOCUMENTS = [(0, "documents", 960, 64, 8)] * 8
QUESTIONS = [(3 * i, "questions", 32, 16, 0) for i in range(16)]


def waits(policy: str) -> dict[str, list[int]]:
    """Serve the workload under a policy; return the waits by owner."""
    blocks = BlockManager(num_blocks=512, block_size=16)
    scheduler = Scheduler(blocks, max_num_seqs=4, max_num_batched_tokens=256, policy=Policy(policy))
    coming = dict(enumerate(DOCUMENTS + QUESTIONS))
    arrived: dict[str, tuple] = {}
    first_token: dict[str, int] = {}  # the step after which it is known
    step = 0
    while coming or scheduler.has_work:
        for i, (at, owner, num_prompt, num_output, priority) in list(coming.items()):
            if at == step:
                request = Request(
                    str(i),
                    [i] * num_prompt,
                    SamplingParams(),
                    max_num_tokens=num_prompt + num_output,
                    priority=priority,  # only the policy "priority" reads it
                    owner=owner,  # only the policy "fair" reads it
                )
                scheduler.add(request)
                arrived[request.request_id] = coming.pop(i)
        plan = scheduler.schedule()
        for info, _, _, num_samples in plan.rows():
            if num_samples:
                first_token.setdefault(info.request_id, step + 1)
        if plan.requests:  # a runner would compute the plan; here each sample is token 1
            scheduler.commit(plan, [1] * plan.num_sampled)
        step += 1
    found: dict[str, list[int]] = {}
    for request_id, (at, owner, *_) in arrived.items():
        found.setdefault(owner, []).append(first_token[request_id] - at)
    return found


def main() -> None:
    print("wait in steps     questions         documents")
    print("policy          mean  longest     mean  longest")
    for policy in MAX_OVERTAKES:
        found = waits(policy)
        columns = [
            f"{mean(found[owner]):9.1f}{max(found[owner]):9}"
            for owner in ("questions", "documents")
        ]
        print(f"{policy:14}" + "".join(columns).removeprefix("  "))


if __name__ == "__main__":
    main()
