"""Check that the results of a token depend only on its id and position, and not on the number, the
order or the positions of the tokens in the pass.

Models change their behaviour at thresholds: keys are compressed from 128 tokens on, queries are
scaled by the index of a token in the pass from 8,192 on, frequencies change after the original
context. So passes have the lengths and the positions around each integer of the config that could
be a threshold (:mod:`.thresholds`):

1. *lengths*: a pass of L tokens repeats the eight of a short pass, and each token must give the
   queries, keys, values and logits that it has there;
2. *far positions*: tokens at t - 1, t and t + 1 must not change the others, and must themselves be
   the same with and without tokens that are still farther away;
3. *calls*: scales, masks and all other properties of attention calls must be the same in the
longest
   pass as in a short one.

That takes dozens of passes, some with thousands of tokens, so they omit operations that cannot make
a token depend on another (:mod:`.cheap_passes`). The passes of :mod:`.probe`, with few tokens, omit
nothing.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from ...errors import UnsupportedModelError
from ...kernels.attention.attention_spec import AttentionSpec
from .cheap_passes import cheap_passes
from .probe_pass import ProbePass, all_same
from .thresholds import ReachPlan, Threshold, budget_of, plan_reach, thresholds_of

logger = logging.getLogger("pagespec")


def check_reach(
    probe_pass: ProbePass, specs: Sequence[AttentionSpec], check_calls: Callable[[Tensor], None]
) -> ReachPlan:
    """Refuse a model whose tokens depend on anything but their own id and position. Returns what
    was tested.

    Args:
        specs: as recorded by the probe; ``pagespec_call`` is set on the attention modules.
        check_calls: records the attention calls of a pass and refuses calls that differ from
            ``specs``; called with the ids of consecutive tokens.
    """
    loaded, ids = probe_pass.loaded, probe_pass.base[0]
    with cheap_passes(probe_pass, specs) as cost:
        plan = plan_reach(thresholds_of(loaded, specs), cost, budget_of(loaded))
        if plan.beyond:
            beyond = "; ".join(map(str, plan.beyond))
            logger.info("%s: no pass is long enough for %s", loaded.architecture, beyond)
        with probe_pass.stand_in():
            longest = _check_lengths(probe_pass, plan)
            _check_positions(probe_pass, plan.thresholds)
        # At consecutive positions, so that masks treat them as one text.
        longest = min(longest, loaded.max_position_embeddings)
        check_calls(ids.repeat(-(-longest // len(ids)))[:longest])
    return plan


def _check_lengths(probe_pass: ProbePass, plan: ReachPlan) -> int:
    """Return the length of the longest pass that fits into memory."""
    ids, positions = probe_pass.base
    expected = probe_pass.results(ids, positions)
    num_tokens, architecture = len(ids), probe_pass.loaded.architecture
    longest = num_tokens
    for length, threshold in plan.lengths:
        # From the last one on: the farthest position is in every pass.
        at = num_tokens - 1 - torch.arange(length, device=ids.device) % num_tokens
        try:
            results = probe_pass.results(ids[at], positions[at])
            is_same = all_same(results, [tensor[at] for tensor in expected])
        except torch.OutOfMemoryError:
            logger.info("%s: no memory for a pass of %d tokens", architecture, length)
            continue
        except UnsupportedModelError as error:
            raise _refusal(f"{error}", threshold) from error
        if not is_same:
            raise _refusal(
                f"{architecture}: its results depend on the number of tokens in a pass: a "
                f"token's queries, keys, values or logits differ between {length} and {num_tokens}",
                threshold,
            )
        longest = max(longest, length)
    return longest


def _check_positions(probe_pass: ProbePass, thresholds: Sequence[Threshold]) -> None:
    ids, positions = probe_pass.base
    expected = probe_pass.results(ids, positions)
    loaded = probe_pass.loaded
    limit, architecture = loaded.max_position_embeddings, loaded.architecture
    groups: list[tuple[list[int], Threshold | None]] = [([limit - 1], None)]
    for t in sorted(thresholds, key=lambda threshold: threshold.value):
        far = [p for p in (t.value - 1, t.value, t.value + 1) if p < limit]
        if far:
            groups.append((far, t))

    def with_far(*groups: list[int]) -> list[Tensor]:
        """The results for the base's tokens followed by some tokens at far positions."""
        far = torch.tensor([p for group in groups for p in group], device=ids.device)
        at = torch.tensor([i for group in groups for i in range(len(group))], device=ids.device)
        return probe_pass.results(torch.cat([ids, ids[at]]), torch.cat([positions, far]))

    def refusal(far: Sequence[int], threshold: Threshold | None) -> UnsupportedModelError:
        return _refusal(
            f"{architecture}: its position embeddings depend on the longest position of the "
            f"batch: with tokens at positions up to {max(far)}, those before them change",
            threshold,
        )

    alone: list[list[Tensor]] = []
    for far, threshold in groups:
        results = with_far(far)
        if not all_same([x[: len(ids)] for x in results], expected):
            raise refusal(far, threshold)
        alone.append([x[len(ids) :] for x in results])
    # The far tokens themselves: each group together with all others and the farthest of all.
    together = with_far(*(far for far, _ in groups))
    begin = len(ids)
    for (far, threshold), results in zip(groups, alone, strict=True):
        if not all_same([x[begin : begin + len(far)] for x in together], results):
            raise refusal([limit - 1], threshold)
        begin += len(far)


def _refusal(reason: str, threshold: Threshold | None) -> UnsupportedModelError:
    return UnsupportedModelError(f"{reason} (config: {threshold})" if threshold else reason)
