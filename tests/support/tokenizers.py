"""Small in-memory tokenizers of the two kinds whose tokens may end inside a UTF-8 character.

The expected text of their tokens is computed from bytes.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

UNKNOWN = "\ufffd"
SPECIAL = ["<unk>", "<s>", "</s>"]


def _wrapped(tokenizer: Tokenizer) -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        unk_token="<unk>",
        bos_token="<s>",
        eos_token="</s>",
        clean_up_tokenization_spaces=False,
    )


def byte_fallback() -> PreTrainedTokenizerFast:
    """Like Llama 2: words with a mark for the space before them, and one token per byte."""
    words = ["▁", "a", "b", "é", "語", "▁a", "ab", "▁▁", UNKNOWN]
    tokens = [*SPECIAL, *(f"<0x{byte:02X}>" for byte in range(256)), *words]
    model = models.BPE(
        vocab={token: i for i, token in enumerate(tokens)},
        merges=[("▁", "a"), ("a", "b"), ("▁", "▁")],
        byte_fallback=True,
        unk_token="<unk>",
    )
    tokenizer = Tokenizer(model)
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(),
         decoders.Strip(" ", 1, 0)]
    )  # fmt: skip
    return _wrapped(tokenizer)


def byte_level() -> PreTrainedTokenizerFast:
    """Like GPT-2: every token is a few bytes and may end inside a character."""
    letters = _letters()
    pairs = [b" a", b"ab", b"\xc3\xa9", b"\xf0\x9f", b"a\xc3", b"\xa9a", b"\xef\xbf"]
    merges = [tuple(letters[byte] for byte in pair) for pair in pairs]
    tokens = [*SPECIAL, *letters, *("".join(pair) for pair in merges)]
    model = models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges)
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return _wrapped(tokenizer)


def unigram() -> PreTrainedTokenizerFast:
    """Like T5 or Gemma's SentencePiece: a unigram model with byte fallback. Its decoder turns the
    mark into a space."""
    words = ["▁", "a", "b", "é", "語", "▁a", "ab", "answer", "▁answer", "▁▁"]
    tokens = [*SPECIAL, *(f"<0x{byte:02X}>" for byte in range(256)), *words]
    scores = [0.0, 0.0, 0.0, *([-20.0] * 256), *(-5.0 + len(word) for word in words)]
    model = models.Unigram(list(zip(tokens, scores, strict=True)), unk_id=0, byte_fallback=True)
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace()])
    return _wrapped(tokenizer)


def word_pieces() -> PreTrainedTokenizerFast:
    """Like BERT: pieces of words, with spaces between words."""
    words = ["a", "b", "play", "##ing", "##s", "é", "."]
    vocab = {token: i for i, token in enumerate([*SPECIAL, *words])}
    tokenizer = Tokenizer(models.WordPiece(vocab, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece(prefix="##", cleanup=False)
    return _wrapped(tokenizer)


def _letters() -> list[str]:
    """GPT-2's letter for each byte: the byte itself if it is printable, else one from 256 on."""
    printed = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(256, 512))
    return [chr(byte) if byte in printed else chr(next(others)) for byte in range(256)]


def text_of(tokenizer: PreTrainedTokenizerFast, token_ids: Sequence[int]) -> str:
    """The text of all ids, from their bytes. U+FFFD replaces an invalid byte after a byte fallback
    (as in SentencePiece), else the invalid beginning of a character (as in Unicode)."""
    tokens = tokenizer.convert_ids_to_tokens([i for i in token_ids if i >= len(SPECIAL)])
    if "<0x00>" not in tokenizer.get_vocab():
        byte_of = {letter: byte for byte, letter in enumerate(_letters())}
        return bytes(byte_of[c] for token in tokens for c in token).decode("utf-8", "replace")
    content = b""
    for token in tokens:
        is_byte = re.fullmatch("<0x..>", token)
        content += bytes([int(token[3:5], 16)]) if is_byte else token.replace("▁", " ").encode()
    text, begin = "", 0
    while begin < len(content):
        for end in range(begin + 1, begin + 5):
            try:
                text += content[begin:end].decode()
            except UnicodeDecodeError:
                continue
            begin = end
            break
        else:
            text += UNKNOWN
            begin += 1
    return text.removeprefix(" ")
