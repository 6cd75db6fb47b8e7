"""Edits of rows of logits as kernels; :mod:`.edit_logits` defines the edits.

A chunk of rows is copied to float32 with its mask and penalties applied. Then the few ids with a
bias are recomputed, because the bias comes before the penalties. Bad words are banned last, which
gives the same result as first. The occurrences of a token in a row's history are counted with
integer atomics, whose order does not affect the result.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from .draw_functions import allowed

EDIT_FIELDS = 12
"""int32 fields of an edited row, each an array ``[rows]``: row of the logits, row of the history,
number of prompt tokens, number of tokens in total, bits of the float32 repetition, presence and
frequency penalty, row of the masks (-1: none; below it, -2 - row of the constrained ones), first
and end of its bias, first and end of its bad words."""

_BLOCK = 1024
_LIST_BLOCK = 128
_PROMPT = 1 << 30
"""The bit of a count that is set if the prompt contains the token; the lower bits are the output's
count."""


class StagedEdits(NamedTuple):
    """The staged arrays of the edited rows of a step, int32 on the device.

    Attributes:
        fields: ``[EDIT_FIELDS, rows]``.
        bias: ``[2, n]``: ids and bits of float32 values, row after row.
        words: ``[w + 1]``: the start of each bad word in ``word_ids``, row after row.
        word_ids: the tokens of all bad words.
        masks: ``[m, ceil(V / 32)]``.
        constrained: ``[.., >= ceil(V / 32)]``, rows contiguous: masks that were sent before.
    """

    fields: Tensor
    bias: Tensor
    words: Tensor
    word_ids: Tensor
    masks: Tensor
    constrained: Tensor


class ChunkSizes(NamedTuple):
    """Sizes of some edited rows: the largest per row of each kind. With 0 the launch is omitted.

    Attributes:
        num_tokens: in the history of a row with penalties. num_biases, num_words: per row.
        num_word_tokens: per bad word.
    """

    num_tokens: int
    num_biases: int
    num_words: int
    num_word_tokens: int


@triton.jit
def _field(fields, row, num_rows, NUMBER: tl.constexpr):  # type: ignore[no-untyped-def]
    return tl.load(fields + NUMBER * num_rows + row)


@triton.jit
def _is_penalised(fields, row, num_rows):  # type: ignore[no-untyped-def]
    """The bits of 1 and of both zeros mean no penalty."""
    is_seen_different = _field(fields, row, num_rows, 4) != 0x3F800000
    output = _field(fields, row, num_rows, 5) | _field(fields, row, num_rows, 6)
    return is_seen_different | (output != 0)


@triton.jit
def _penalised(logit, fields, row, num_rows, counts, mask, PROMPT: tl.constexpr):  # type: ignore[no-untyped-def]
    """Logits of a row after its penalties, given the counts of its tokens."""
    if _is_penalised(fields, row, num_rows):
        repetition = _field(fields, row, num_rows, 4).to(tl.float32, bitcast=True)
        presence = _field(fields, row, num_rows, 5).to(tl.float32, bitcast=True)
        frequency = _field(fields, row, num_rows, 6).to(tl.float32, bitcast=True)
        count = tl.load(counts, mask=mask, other=0)
        num_generated = count & (PROMPT - 1)
        seen = tl.where(logit > 0, logit / repetition, logit * repetition)
        logit = tl.where(count != 0, seen, logit)
        logit = logit - frequency * num_generated.to(tl.float32)
        logit = logit - tl.where(num_generated > 0, presence, 0.0)
    return logit


@triton.jit(do_not_specialize=["first", "num_rows", "width"])
def _count_kernel(  # type: ignore[no-untyped-def]
    fields, history, counts, first, num_rows, width,
    VOCAB: tl.constexpr, PROMPT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Count the tokens of a row with penalties. Grid: ``(chunk, blocks of the longest)``."""
    row = first + tl.program_id(0)
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = (i < _field(fields, row, num_rows, 3)) & _is_penalised(fields, row, num_rows)
    history_row = _field(fields, row, num_rows, 1).to(tl.int64)
    token = tl.load(history + history_row * width + i, mask=mask, other=-1)
    mask &= (token >= 0) & (token < VOCAB)
    target = counts + tl.program_id(0).to(tl.int64) * VOCAB + token
    is_prompt = i < _field(fields, row, num_rows, 2)
    tl.atomic_or(target, PROMPT, mask=mask & is_prompt)
    tl.atomic_add(target, 1, mask=mask & (i >= _field(fields, row, num_rows, 2)))


@triton.jit(do_not_specialize=["first", "num_rows", "constrained_stride"])
def _copy_kernel(  # type: ignore[no-untyped-def]
    logits, fields, counts, masks, constrained, out, first, num_rows, logits_stride,
    constrained_stride,
    VOCAB: tl.constexpr, PROMPT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Rows in float32, with masks and penalties. Grid: ``(blocks of VOCAB, chunk)``."""
    row = first + tl.program_id(1)
    first_id = tl.program_id(0) * BLOCK
    ids = first_id + tl.arange(0, BLOCK)
    is_id = ids < VOCAB
    place = _field(fields, row, num_rows, 0).to(tl.int64)
    logit = tl.load(logits + place * logits_stride + ids, mask=is_id, other=0.0).to(tl.float32)
    mask_row = _field(fields, row, num_rows, 7)
    if mask_row >= 0:
        num_words = (VOCAB + 31) // 32
        logit = allowed(logit, masks + mask_row.to(tl.int64) * num_words, first_id, VOCAB, BLOCK)
    elif mask_row < -1:
        words = constrained + (-2 - mask_row).to(tl.int64) * constrained_stride
        logit = allowed(logit, words, first_id, VOCAB, BLOCK)
    offset = tl.program_id(1).to(tl.int64) * VOCAB
    logit = _penalised(logit, fields, row, num_rows, counts + offset + ids, is_id, PROMPT)
    tl.store(out + offset + ids, logit, mask=is_id)


@triton.jit(
    do_not_specialize=["first", "num_rows", "num_biases"],
    do_not_specialize_on_alignment=["bias"],
)
def _bias_kernel(  # type: ignore[no-untyped-def]
    logits, fields, counts, bias, out, first, num_rows, num_biases, logits_stride,
    VOCAB: tl.constexpr, PROMPT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Recompute the ids of a row that have a bias. Grid: ``(chunk, blocks of the most per
    row)``."""
    row = first + tl.program_id(0)
    i = _field(fields, row, num_rows, 8) + tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = i < _field(fields, row, num_rows, 9)
    ids = tl.load(bias + i, mask=mask, other=0)
    value = tl.load(bias + num_biases + i, mask=mask, other=0).to(tl.float32, bitcast=True)
    place = _field(fields, row, num_rows, 0).to(tl.int64)
    logit = tl.load(logits + place * logits_stride + ids, mask=mask, other=0.0).to(tl.float32)
    logit += value
    target = tl.program_id(0).to(tl.int64) * VOCAB + ids
    logit = _penalised(logit, fields, row, num_rows, counts + target, mask, PROMPT)
    # Ids banned by the mask stay banned.
    is_kept = tl.load(out + target, mask=mask, other=0.0) != float("-inf")
    tl.store(out + target, logit, mask=mask & is_kept)


@triton.jit(
    do_not_specialize=["first", "num_rows", "width", "num_word_tokens"],
    do_not_specialize_on_alignment=["words", "word_ids"],
)
def _bad_words_kernel(  # type: ignore[no-untyped-def]
    fields, history, words, word_ids, out, first, num_rows, width, num_word_tokens,
    VOCAB: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Ban the last token of each bad word whose other tokens end the output.

    Grid: ``(chunk, blocks of the most words per row)``.
    """
    row = first + tl.program_id(0)
    word = _field(fields, row, num_rows, 10) + tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = word < _field(fields, row, num_rows, 11)
    begin = tl.load(words + word, mask=mask, other=0)
    last = tl.load(words + word + 1, mask=mask, other=1) - 1
    num_prompt = _field(fields, row, num_rows, 2)
    num_tokens = _field(fields, row, num_rows, 3)
    base = history + _field(fields, row, num_rows, 1).to(tl.int64) * width
    for back in range(1, num_word_tokens):
        is_part = mask & (last - back >= begin)
        wanted = tl.load(word_ids + last - back, mask=is_part, other=0)
        # -1, which is no id, before the start of the output.
        place = num_tokens - back
        found = tl.load(base + place, mask=place >= num_prompt, other=-1)
        mask &= (last - back < begin) | (found == wanted)
    banned = tl.load(word_ids + last, mask=mask, other=0)
    target = out + tl.program_id(0).to(tl.int64) * VOCAB + banned
    tl.store(target, float("-inf"), mask=mask)


def edit_rows(
    logits: Tensor,
    edits: StagedEdits,
    history: Tensor,
    counts: Tensor,
    out: Tensor,
    first: int,
    sizes: ChunkSizes,
) -> None:
    """Write the edited rows ``[first, first + n)`` of a step to ``out``; can be captured.

    Args:
        logits: ``[S, V]``, any float dtype, rows contiguous.
        history: int32 ``[.., most tokens]``, contiguous.
        counts: int32 ``[>= n, V]``, overwritten if there are penalties.
        out: float32 ``[n, V]``, contiguous.
        sizes: at least those of these rows.
    """
    num_chunk, vocab_size = out.shape
    num_rows = edits.fields.shape[1]
    constants = {"VOCAB": vocab_size, "PROMPT": _PROMPT}
    width = history.shape[1]
    if sizes.num_tokens:
        counts[:num_chunk].zero_()
        _count_kernel[(num_chunk, triton.cdiv(sizes.num_tokens, _BLOCK))](
            edits.fields, history, counts, first, num_rows, width, **constants, BLOCK=_BLOCK
        )
    _copy_kernel[(triton.cdiv(vocab_size, _BLOCK), num_chunk)](
        logits, edits.fields, counts, edits.masks, edits.constrained, out, first, num_rows,
        logits.stride(0), edits.constrained.stride(0), **constants, BLOCK=_BLOCK,
    )  # fmt: skip
    if sizes.num_biases:
        _bias_kernel[(num_chunk, triton.cdiv(sizes.num_biases, _LIST_BLOCK))](
            logits, edits.fields, counts, edits.bias, out, first, num_rows, edits.bias.shape[1],
            logits.stride(0), **constants, BLOCK=_LIST_BLOCK,
        )  # fmt: skip
    if sizes.num_words:
        _bad_words_kernel[(num_chunk, triton.cdiv(sizes.num_words, _LIST_BLOCK))](
            edits.fields, history, edits.words, edits.word_ids, out, first, num_rows, width,
            sizes.num_word_tokens, VOCAB=vocab_size, BLOCK=_LIST_BLOCK,
        )  # fmt: skip


@triton.jit(
    do_not_specialize=["num_tokens", "width"],
    do_not_specialize_on_alignment=["rows", "positions"],
)
def _keep_history_kernel(  # type: ignore[no-untyped-def]
    input_ids, rows, positions, history, num_tokens, width, BLOCK: tl.constexpr
):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    row = tl.load(rows + i, mask=i < num_tokens, other=-1)
    mask = row >= 0
    position = tl.load(positions + i, mask=mask, other=0)
    token = tl.load(input_ids + i, mask=mask, other=0)
    tl.store(history + row.to(tl.int64) * width + position, token.to(tl.int32), mask=mask)


def keep_history(input_ids: Tensor, rows: Tensor, positions: Tensor, history: Tensor) -> None:
    """Write the tokens of a step into the histories.

    Args:
        input_ids: int64 ``[T]``. rows, positions: int32 ``[T]``: destinations; rows below 0 are
            padding.
        history: int32 ``[.., most tokens]``, contiguous.
    """
    num_tokens = len(rows)
    _keep_history_kernel[(triton.cdiv(num_tokens, _BLOCK),)](
        input_ids, rows, positions, history, num_tokens, history.shape[1], BLOCK=_BLOCK
    )
