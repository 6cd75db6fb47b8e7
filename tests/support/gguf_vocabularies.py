"""Small GGUF vocabularies, learnt from texts without pre-tokenization.

Their merges cross every boundary that a pre-tokenizer's expression can set, so a wrong boundary
changes the token ids.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, trainers

SPECIAL = ["<|bos|>", "<|endoftext|>", "<|im_start|>", "<|im_end|>"]
USER_DEFINED = ["<think>", "</think>", "<tool_call>", "    ", "\n\n\n\n", "ø"]
_MARK = "▁"
_RUN_SCORE = -1e9  # of runs of spaces, as in Llama 2's vocabulary


def byte_level_vocabulary(texts: Sequence[str], size: int) -> dict[str, Any]:
    """Arguments of ``add_vocabulary`` for a byte-level BPE, with atomic tokens of all types."""
    tokens, merges = _learnt(
        texts,
        size,
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        sorted(pre_tokenizers.ByteLevel.alphabet()),
    )
    # "ø" stands for a byte that no text has.
    tokens = [token for token in tokens if token not in USER_DEFINED]
    first = len(tokens)
    return {
        "model": "gpt2",
        "tokens": [*tokens, *SPECIAL, *USER_DEFINED, "[PAD0]"],
        "types": [1] * first + [3] * len(SPECIAL) + [4] * len(USER_DEFINED) + [5],
        "merges": merges,
        "keys": {
            "tokenizer.ggml.bos_token_id": first,
            "tokenizer.ggml.eos_token_id": first + 1,
        },
    }


def sentencepiece_vocabulary(texts: Sequence[str], size: int) -> dict[str, Any]:
    """The same for a BPE with scores and a token for each byte."""
    pieces, merges = _learnt(texts, size, None, [])
    merged = ["".join(merge.split(" ")) for merge in merges]
    runs = [_MARK * length for length in range(2, 17)]
    letters = [piece for piece in pieces if len(piece) == 1]
    pieces = [*runs, *dict.fromkeys(piece for piece in merged if piece not in runs)]
    head = ["<unk>", "<s>", "</s>"] + [f"<0x{byte:02X}>" for byte in range(256)]
    own = USER_DEFINED[:3]
    scores = [0.0] * len(head) + [_RUN_SCORE] * len(runs)
    scores += [float(-rank) for rank in range(len(pieces) - len(runs))]
    scores += [-1e6 - rank for rank in range(len(letters))] + [0.0] * (len(own) + 1)
    return {
        "model": "llama",
        "tokens": [*head, *pieces, *letters, *own, "<|im_end|>"],
        "types": [2, 3, 3, *[6] * 256, *[1] * (len(pieces) + len(letters)), *[4] * len(own), 3],
        "scores": scores,
        "keys": {"tokenizer.ggml.bos_token_id": 1, "tokenizer.ggml.eos_token_id": 2},
    }


def gemma_vocabulary(texts: Sequence[str], size: int) -> dict[str, Any]:
    """The same for a BPE with merges, marks for spaces and a token for each byte."""
    pieces, merges = _learnt([text.replace(" ", _MARK) for text in texts], size, None, [])
    merges = [merge for merge in merges if "\n" not in merge]
    kept = {"".join(merge.split(" ")) for merge in merges}
    pieces = [piece for piece in pieces if piece in kept or len(piece) == 1]
    newlines = ["\n\n", "\n\n\n"]
    head = ["<pad>", "<eos>", "<bos>", "<unk>"] + [f"<0x{byte:02X}>" for byte in range(256)]
    own = [*USER_DEFINED[:3], "<turn|>"]
    return {
        "model": "gemma4",
        "tokens": [*head, *pieces, *newlines, *own],
        "types": [3] * 4 + [6] * 256 + [1] * (len(pieces) + len(newlines)) + [4] * 3 + [3],
        "merges": [*merges, "\n \n", "\n\n \n"],
        "keys": {
            f"tokenizer.ggml.{name}_token_id": token_id
            for token_id, name in enumerate(("padding", "eos", "bos", "unknown"))
        },
    }


def _learnt(
    texts: Sequence[str], size: int, cut: Any, alphabet: list[str]
) -> tuple[list[str], list[str]]:
    tokenizer = Tokenizer(models.BPE())
    if cut is None:
        marks = [normalizers.Prepend(_MARK), normalizers.Replace(" ", _MARK)]
        tokenizer.normalizer = normalizers.Sequence(marks)
    else:
        tokenizer.pre_tokenizer = cut
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        min_frequency=1,
        show_progress=False,
        initial_alphabet=alphabet,
        limit_alphabet=max(len(alphabet), 160),
        max_token_length=24,
    )
    atomic = [*SPECIAL, *USER_DEFINED, "</s>", "<unk>", "<s>", "<0x", "\0"]
    plain = [text for text in texts if text and not any(token in text for token in atomic)]
    tokenizer.train_from_iterator(plain, trainer)
    model = json.loads(tokenizer.to_str())["model"]
    tokens = sorted(model["vocab"], key=model["vocab"].get)
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in model["merges"]]
    return tokens, merges
