"""Integers of a model's config at which its behaviour could change, and the passes that test them.

A window, a compression rate, a lower bound, a chunk size or an original context length is a number
of tokens or a position in the config. Names do not decide which integers are thresholds. Each
integer that a context can reach is tested, at t - 1, t and t + 1. The same holds for each that the
number of tokens of a pass can reach; such a pass serves many contexts at once. A large model cannot
afford all tests. Integers that are also the size of a weight or of attention heads, as most are,
come after the others. They are not omitted: a window of 128 and a head size of 128 are the same
integer.

The cost of passes is measured in elements computed, never in seconds: the load of the machine must
not decide which models are refused.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from ...kernels.attention.attention_spec import AttentionSpec
from ..model.loaded import LoadedModel

MAX_PASS_TOKENS = (1 << 14) + 1
"""Tokens of the longest pass."""
_MIN_BUDGET = 1 << 27
"""Elements that these passes may write in total: about 0.1 s of one CPU thread. For large models
half of their number of parameters: the time of a pass of eight tokens over all weights."""
_GPU_FACTOR = 16
_OPERATION_COST = 1 << 13
"""Additional cost of an operation, in elements written in the same time."""
_FEWEST = 2


@dataclass(frozen=True, slots=True)
class Threshold:
    """An integer of the config that a context of the model, or the number of tokens of a pass, can
    reach.

    Attributes:
        value: a number of tokens, or a position; at least 2.
        fields: the config's fields that contain it, for example "rope_parameters.factor".
        is_size: whether it is also the size of a weight or of attention heads.
    """

    value: int
    fields: tuple[str, ...]
    is_size: bool

    def __str__(self) -> str:
        return f"{', '.join(self.fields)} = {self.value}"


class PassCost(NamedTuple):
    """The cost of a pass: operations, and elements that they write per token."""

    num_operations: int
    elements_per_token: int


@dataclass(frozen=True, slots=True)
class ReachPlan:
    """The passes of a probe around the thresholds of a model.

    Attributes:
        lengths: (number of tokens of a pass, the threshold that it tests), ascending.
        beyond: thresholds for which no pass is long enough; they are also tested with far
            positions.
    """

    thresholds: tuple[Threshold, ...]
    lengths: tuple[tuple[int, Threshold | None], ...]
    beyond: tuple[Threshold, ...]

    @property
    def longest(self) -> int:
        return max(length for length, _ in self.lengths)


def thresholds_of(loaded: LoadedModel, specs: Sequence[AttentionSpec]) -> list[Threshold]:
    """Thresholds within the longest context before those beyond it; within each, those that are no
    sizes first; then ascending."""
    fields: dict[int, list[str]] = {}
    text_config = loaded.config.get_text_config(decoder=True)
    for config in (text_config, loaded.config):
        # Without the configs of other parts, for example of a vision tower.
        own = {k: v for k, v in config.to_dict().items() if k not in config.sub_configs}
        for name, number in _integers(own):
            if name not in fields.setdefault(number, []):
                fields[number].append(name)
    for spec in specs:
        # A window that the code sets, not the config.
        for name, size in (("window", spec.window), ("chunk", spec.chunk)):
            if not fields.setdefault(size, []):
                fields[size].append(f"{name} of its mask")
    sizes = {size for parameter in loaded.module.parameters() for size in parameter.shape}
    for spec in specs:
        sizes |= {spec.num_q_heads, spec.num_kv_heads, spec.k_dim, spec.v_dim}
    limit = loaded.max_position_embeddings
    found = [
        Threshold(number, tuple(names), number in sizes)
        for number, names in fields.items()
        if _FEWEST <= number < max(limit, MAX_PASS_TOKENS)
    ]
    return sorted(found, key=lambda t: (t.value >= limit, t.is_size, t.value))


def _integers(value: Any, name: str = "") -> Iterator[tuple[str, int]]:
    """(field, integer) of nested dicts and lists. Floats are rates and bases: rope_theta = 1e4."""
    if isinstance(value, Mapping):
        for key, part in value.items():
            yield from _integers(part, f"{name}.{key}" if name else str(key))
    elif isinstance(value, (list, tuple, set)):
        for part in value:
            yield from _integers(part, name)
    elif isinstance(value, int) and not isinstance(value, bool):
        yield name, value


def budget_of(loaded: LoadedModel) -> int:
    """Elements that all passes of a model may write in total."""
    num_parameters = sum(parameter.numel() for parameter in loaded.module.parameters())
    budget = max(_MIN_BUDGET, num_parameters // 2)
    return budget * _GPU_FACTOR if loaded.device.type == "cuda" else budget


def plan_reach(thresholds: Sequence[Threshold], cost: PassCost, budget: int) -> ReachPlan:
    """Choose the lengths of passes to run: all of a small model's, and the affordable ones of a
    large model. ``thresholds`` have the order of :func:`thresholds_of`."""
    # Some models treat one token specially, as the step of a decode.
    lengths: dict[int, Threshold | None] = {1: None}
    beyond: list[Threshold] = []
    left = budget
    # Most changes appear just above a threshold and persist, so that length comes first for all of
    # them.
    for offsets in ((1,), (0, -1)):
        for threshold in thresholds:
            for length in (threshold.value + offset for offset in offsets):
                if length in lengths:
                    continue
                needed = length * cost.elements_per_token + cost.num_operations * _OPERATION_COST
                if length <= MAX_PASS_TOKENS and needed <= left:
                    lengths[length] = threshold
                    left -= needed
                elif length > threshold.value:
                    beyond.append(threshold)
    return ReachPlan(tuple(thresholds), tuple(sorted(lengths.items())), tuple(beyond))
