"""The edited rows of logits of a step as arrays, from its plan; and the callers'
``logits_processors``."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, chain, count, pairwise, repeat
from threading import current_thread, main_thread

import numpy as np
from torch import Tensor

from ..engine.logit_edits import LogitEdits
from ..engine.plan import LastTwoBatches, StepPlan
from ..engine.request import RequestInfo
from ..errors import shortened
from ..kernels.sampling.edit_logits import processed
from ..structured.matchers import Masks
from .pinned import IntArray

logger = logging.getLogger("pagespec")

NUM_FIELDS = 12
_MAX_REASON = 300
_NOTHING = LogitEdits()
_NO_MASKS = np.empty((0, 0), np.int32)
# A request, whether ``min_tokens`` still bans its end tokens, and the index of its mask, if any
_Edited = tuple[RequestInfo, bool, int | None]


@dataclass(frozen=True, slots=True)
class EditBatch:
    """Edited rows of logits. ``kernels.sampling.edit_kernels`` defines the arrays.

    Attributes:
        requests: the requests of the rows. A request with draft tokens has a row per sample.
        fields: int32 ``[NUM_FIELDS, n]``. bias: int32 ``[2, m]``. words: int32 ``[w + 1]``.
        word_ids: int32. masks: int32 ``[k, ceil(V / 32)]``.
        constrained: masks of constrained rows: int32 ``[m, ceil(V / 32)]``.
    """

    requests: tuple[RequestInfo, ...]
    fields: IntArray
    bias: IntArray
    words: IntArray
    word_ids: IntArray
    masks: IntArray
    constrained: IntArray = field(default_factory=lambda: _NO_MASKS)

    def __len__(self) -> int:
        return len(self.requests)

    def bias_of(self, row: int) -> IntArray:
        """``[2, n]``"""
        return self.bias[:, self.fields[8, row] : self.fields[9, row]]

    def words_of(self, row: int) -> list[list[int]]:
        ends = self.words[self.fields[10, row] : self.fields[11, row] + 1].tolist()
        return [self.word_ids[begin:end].tolist() for begin, end in pairwise(ends)]

    def mask_of(self, row: int) -> IntArray | None:
        number = self.fields[7, row]
        if number < -1:
            return self.constrained[-2 - number]
        return None if number < 0 else self.masks[number]


@dataclass(frozen=True, slots=True)
class _RowLists:
    """The arrays of a request. They are the same for each token, except that ``min_tokens`` bans
    end tokens."""

    penalties: IntArray
    bias: IntArray
    early_bias: IntArray
    allowed: IntArray | None

    @classmethod
    def of(cls, edits: LogitEdits, vocab_size: int) -> _RowLists:
        penalties = (
            edits.repetition_penalty,
            edits.presence_penalty,
            edits.frequency_penalty,
        )
        bias = dict(edits.bias)
        early = bias | dict.fromkeys(edits.stop_token_ids, -np.inf)
        return cls(
            np.array(penalties, np.float32).view(np.int32),
            _bias(bias),
            _bias(early),
            None if edits.allowed is None else mask_of_ids(edits.allowed, vocab_size),
        )


def _bias(bias: Mapping[int, float]) -> IntArray:
    values = np.array(list(bias.values()), np.float32).view(np.int32)
    return np.stack([np.array(list(bias), np.int32), values])


def mask_of_ids(token_ids: Sequence[int], vocab_size: int) -> IntArray:
    """int32 ``[ceil(vocab_size / 32)]`` with the bits of these ids."""
    flags = np.zeros(-(-vocab_size // 32) * 32, np.uint8)
    flags[list(token_ids)] = 1
    return np.packbits(flags, bitorder="little").view("<i4").astype(np.int32, copy=False)


class EditPacker:
    """Finds the edited rows of plans. For a plan without such requests it costs one comparison.

    Attributes:
        failures: reasons why requests of the batch packed last cannot be edited, by request id.
    """

    def __init__(self) -> None:
        self.any_edited = False
        self.any_history = False
        self._lists: dict[RequestInfo, _RowLists] = {}
        self.failures: dict[str, str] = {}
        self._kept: tuple[tuple[tuple[_Edited, ...], EditBatch, list[IntArray | None]], ...] = ()
        self._found = LastTwoBatches[tuple[bool, bool]]()

    def look(self, plan: StepPlan) -> None:
        """Set ``any_edited`` and ``any_history`` for this plan: whether a row may be edited, and
        whether an edit needs the history of a row, now or later."""
        found = self._found.get(plan.requests)
        if found is None:
            edits = [request.edits for request in plan.requests if request.edits is not None]
            found = bool(edits), any(each.needs_history for each in edits)
            self._found.put(plan.requests, found)
        self.any_edited, self.any_history = found

    def pack(
        self,
        plan: StepPlan,
        vocab_size: int,
        history_rows: Sequence[int],
        masks: Masks | None = None,
    ) -> EditBatch | None:
        """The edited rows, in the order of the logits; None if there are none. Each sample of a row
        with draft tokens is edited on its own: its history ends before it.

        Args:
            history_rows: index of the history of each row of the plan.
            masks: the ids that samples of constrained rows may be. Ids outside
                ``allowed_token_ids`` are removed from the masks here.
        """
        numbers = {} if masks is None else masks.numbers
        rows: list[tuple[int, int, int, int]] = []
        edited: list[_Edited] = []
        for row, place, num_after in self._candidates(plan, masks):
            request = plan.requests[row]
            num_known = plan.starts[row] + plan.num_tokens[row] - num_after
            num_output = num_known - request.num_prompt_tokens
            edits, mask = request.edits, numbers.get(place)
            if (edits is not None and edits.is_active(num_output)) or mask is not None:
                rows.append((place, history_rows[row], request.num_prompt_tokens, num_known))
                edited.append((request, edits is not None and num_output < edits.min_tokens, mask))
        if not rows:
            return None
        key = tuple(edited)
        made = next((made for made in self._kept if made[0] == key), None)
        if made is None:
            batch = self._pack_lists(edited, vocab_size)
            made = key, batch, [self._lists[request].allowed for request, _, _ in edited]
            self._kept = (made, *self._kept[:1])  # two: steps may alternate
        _, batch, all_allowed = made
        fields = batch.fields.copy()
        fields[:4] = np.array(rows, np.int32).T
        if masks is None:
            return replace(batch, fields=fields)
        for (_, _, mask), allowed in zip(edited, all_allowed, strict=True):
            if mask is not None and allowed is not None:
                masks.bits[mask] &= allowed
        return replace(batch, fields=fields, constrained=masks.bits)

    def _candidates(self, plan: StepPlan, masks: Masks | None) -> Iterable[tuple[int, int, int]]:
        """Samples whose logits may be edited: (row in the plan, index among the samples of the
        step, number of samples after it in its row)."""
        if masks is not None and not (self.any_edited or plan.has_drafts):
            return zip(masks.rows, masks.numbers, repeat(0), strict=False)
        places = accumulate(plan.num_samples, initial=0)
        rows = zip(count(), places, plan.num_samples, strict=False)
        if not plan.has_drafts:
            return ((row, place, 0) for row, place, num_samples in rows if num_samples)
        return (
            (row, place + i, num_samples - 1 - i)
            for row, place, num_samples in rows
            for i in range(num_samples)
        )

    def _lists_of(self, request: RequestInfo, vocab_size: int) -> _RowLists:
        try:
            return _RowLists.of(request.edits or _NOTHING, vocab_size)
        except Exception as error:  # ends this request only
            self.failures[request.request_id] = f"its logits cannot be edited: {error}"
            return _RowLists.of(_NOTHING, vocab_size)

    def _pack_lists(self, edited: Sequence[_Edited], vocab_size: int) -> EditBatch:
        """Everything but the first four fields."""
        known, self.failures = self._lists, {}
        self._lists = {
            request: known.get(request) or self._lists_of(request, vocab_size)
            for request, _, _ in edited
        }
        fields = np.zeros((NUM_FIELDS, len(edited)), np.int32)
        fields[7] = -1
        biases: list[IntArray] = []
        words: list[tuple[int, ...]] = []
        masks: list[IntArray] = []
        num_biases = 0
        for i, (request, is_early, mask) in enumerate(edited):
            lists, edits = self._lists[request], request.edits or _NOTHING
            fields[4:7, i] = lists.penalties
            if mask is not None:
                fields[7, i] = -2 - mask
            elif lists.allowed is not None:
                fields[7, i] = len(masks)
                masks.append(lists.allowed)
            biases.append(lists.early_bias if is_early else lists.bias)
            fields[8:10, i] = num_biases, num_biases + biases[-1].shape[1]
            num_biases += biases[-1].shape[1]
            fields[10:12, i] = len(words), len(words) + len(edits.bad_words)
            words += edits.bad_words
        ends = np.cumsum([0, *map(len, words)], dtype=np.int32)
        return EditBatch(
            tuple(request for request, _, _ in edited),
            fields,
            np.concatenate(biases, axis=1),
            ends,
            np.fromiter(chain.from_iterable(words), np.int32),
            np.stack(masks) if masks else np.empty((0, -(-vocab_size // 32)), np.int32),
        )


def num_drafts_before(plan: StepPlan, row: int, num_known: int) -> int:
    """The number of draft tokens of a row before its sample that follows ``num_known`` tokens."""
    num_drafts = plan.num_samples[row] - 1
    return num_known - (plan.starts[row] + plan.num_tokens[row] - num_drafts)


def has_processors(request: RequestInfo) -> bool:
    return request.edits is not None and bool(request.edits.processors)


def process(
    request: RequestInfo, row: Tensor, output_token_ids: list[int], failures: dict[str, str]
) -> Tensor:
    """A row of logits after the logits processors of its request.

    Args:
        row: float32 ``[V]`` on the CPU.
        failures: if a processor raises, or no token is left to sample, the reason is added here
            under the request's id, and the row is returned unchanged.
    """
    functions = request.edits.processors if request.edits is not None else ()
    try:
        return processed(row, output_token_ids, functions)
    except BaseException as error:
        # The main thread receives signals. There, a KeyboardInterrupt ends the step, as usual.
        if not isinstance(error, Exception) and current_thread() is main_thread():
            raise
        if request.request_id not in failures:
            logger.warning("logits_processors of %s failed", request.request_id, exc_info=True)
        reason = shortened(f"{type(error).__name__}: {error}", _MAX_REASON)
        failures[request.request_id] = f"logits_processors: {reason}"
        return row
