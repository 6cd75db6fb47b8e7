"""Compare tokenizers of GGUF files with llama.cpp's.

    python -m tests.coverage.gguf_tokenizers [FILES]

Needs llama-cpp-python. Each name of ``tokenizer.ggml.pre`` is tested on a vocabulary whose merges
cross every pre-tokenizer boundary. Each file (llama.cpp's `models/ggml-vocab-*.gguf`, for example)
is tested with its own vocabulary. Compared are the ids with and without special tokens, the text of
ids, and the end tokens.

Exits with 1 if anything differs.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any

from pagespec.compile.load.gguf_expressions import PRE_TOKENIZERS
from pagespec.compile.load.gguf_tokenizer import build_tokenizer
from pagespec.compile.load.gguf_vocabulary import TokenType, read_vocabulary
from pagespec.errors import UnsupportedModelError
from tests.support.gguf_files import write_vocabulary
from tests.support.gguf_vocabularies import (
    SPECIAL,
    USER_DEFINED,
    byte_level_vocabulary,
    gemma_vocabulary,
    sentencepiece_vocabulary,
)
from tests.support.hard_texts import hard_texts

_HTML = "</s>"


@dataclass(slots=True)
class Comparison:
    """The number of compared texts; for each difference the text, our result and llama.cpp's."""

    num_texts: int = 0
    ids: list[tuple[str, Any, Any]] = field(default_factory=list)
    texts: list[tuple[str, Any, Any]] = field(default_factory=list)
    ends: list[Any] = field(default_factory=list)

    @property
    def num_different(self) -> int:
        return len(self.ids) + len(self.texts) + len(self.ends)


class LlamaCpp:
    """llama.cpp's tokenizer of a file."""

    def __init__(self, path: Path) -> None:
        import llama_cpp

        self._api = llama_cpp
        self._llama = llama_cpp.Llama(str(path), vocab_only=True, verbose=False)
        model = self._llama.model
        self._vocab = llama_cpp.llama_model_get_vocab(model)

    def encode(self, text: str, *, adds_special: bool) -> list[int]:
        ids: list[int] = self._llama.tokenize(text.encode(), add_bos=adds_special, special=True)
        return ids

    def piece(self, token_id: int) -> bytes:
        size = 1 << 12
        buffer = ctypes.create_string_buffer(size)
        length = self._api.llama_token_to_piece(self._vocab, token_id, buffer, size, 0, True)
        return bytes(buffer.raw[:length])

    def ends(self, token_id: int) -> bool:
        return bool(self._api.llama_vocab_is_eog(self._vocab, token_id))


def compare(path: Path, texts: Sequence[str]) -> Comparison:
    """Compare a file's tokenizer with llama.cpp's.

    Raises:
        UnsupportedModelError: the file is rejected.
    """
    vocabulary = read_vocabulary(path)
    assert vocabulary is not None
    ours, theirs = build_tokenizer(vocabulary), LlamaCpp(path)
    # llama.cpp calls "</s>" an end even where it is a piece of HTML, as in Qwen's vocabularies.
    has_html = _HTML in vocabulary.tokens and (
        vocabulary.types[vocabulary.tokens.index(_HTML)] == TokenType.NORMAL
    )
    texts = [text for text in texts if not (has_html and _HTML in text)]
    found = Comparison(len(texts))
    has_space = vocabulary.model == "llama" and vocabulary.adds_space is not False
    for text in texts:
        for adds_special in (True, False):
            own = ours(text, add_special_tokens=adds_special)["input_ids"]
            ids = theirs.encode(text, adds_special=adds_special)
            if own != ids:
                found.ids.append((text, own, ids))
        own_text = ours.decode(ids, skip_special_tokens=False)
        their_text = b"".join(map(theirs.piece, ids)).decode("utf-8", "replace")
        if has_space and ids and vocabulary.types[ids[0]] == TokenType.NORMAL:
            their_text = their_text.removeprefix(" ")
        if own_text != their_text:
            found.texts.append((text, own_text, their_text))
    end_ids = {i for i in range(len(vocabulary.tokens)) if theirs.ends(i)}
    found.ends = [vocabulary.tokens[i] for i in end_ids ^ vocabulary.end_ids]
    if has_html and _HTML in found.ends:
        found.ends.remove(_HTML)
    return found


def cases() -> dict[str, dict[str, Any]]:
    """Small vocabularies by name: one per name of ``pre``, and those of other models."""
    texts = hard_texts(60, extra=[*SPECIAL, *USER_DEFINED])
    byte_level = byte_level_vocabulary(texts, 700)
    found = {f"gpt2 {pre}": _with_key(byte_level, "pre", pre) for pre in PRE_TOKENIZERS}
    found["gemma4"] = gemma_vocabulary(texts, 500)
    found["llama"] = sentencepiece = sentencepiece_vocabulary(texts, 500)
    found["llama, no space"] = _with_key(sentencepiece, "add_space_prefix", False)
    ends = _with_key(sentencepiece, "add_eos_token", True)
    found["llama, eos and no bos"] = _with_key(ends, "add_bos_token", False)
    return found


def _with_key(vocabulary: dict[str, Any], name: str, value: Any) -> dict[str, Any]:
    return vocabulary | {"keys": vocabulary["keys"] | {f"tokenizer.ggml.{name}": value}}


def record(file: Path) -> None:
    """Save llama.cpp's results for some texts with :func:`cases`, for tests without llama.cpp."""
    texts = [text for text in hard_texts(24, extra=[*SPECIAL, *USER_DEFINED]) if len(text) < 70]
    texts = [*texts[:-12:4], *texts[-12:]]
    outcomes: list[Any] = []
    found: dict[str, int] = {}
    vocabularies: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        for name, vocabulary in cases().items():
            theirs = LlamaCpp(write_vocabulary(Path(folder) / "a.gguf", **vocabulary))
            ids = [theirs.encode(text, adds_special=True) for text in texts]
            if ids not in outcomes:
                outcomes.append(ids)
            found[name] = outcomes.index(ids)
            kind = name.split()[0].rstrip(",")
            vocabularies.setdefault(kind, {k: v for k, v in vocabulary.items() if k != "keys"})
    keys = {name: vocabulary["keys"] for name, vocabulary in cases().items()}
    content = {"texts": texts, "vocabularies": vocabularies, "keys": keys, "found": found}
    lines = [json.dumps([" ".join(map(str, ids)) for ids in outcome]) for outcome in outcomes]
    file.write_text(json.dumps(content)[:-1] + ', "outcomes": [\n' + ",\n".join(lines) + "\n]}\n")


def _crossing_files(
    folder: Path, texts: Sequence[str], names: Sequence[str]
) -> Iterator[tuple[str, Path]]:
    if not names:
        return
    vocabulary = byte_level_vocabulary(texts, 9_000)
    for pre in names:
        with_pre = _with_key(vocabulary, "pre", pre)
        yield f"gpt2 {pre}", write_vocabulary(folder / "a.gguf", **with_pre)


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--random", type=int, default=400)
    parser.add_argument("--show", type=int, default=0, help="differences to print")
    parser.add_argument("--pre", nargs="*", default=[*PRE_TOKENIZERS])
    parser.add_argument("--record", type=Path, help="write what tests without llama.cpp read")
    parser.add_argument("files", type=Path, nargs="*")
    arguments = parser.parse_args()
    if arguments.record:
        record(arguments.record)
        return 0
    texts = hard_texts(arguments.random, extra=[*SPECIAL, *USER_DEFINED])
    num_different = 0
    print("| vocabulary | texts | ids that differ | texts that differ | ends that differ |")
    print("|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as folder:
        made = _crossing_files(Path(folder), texts, arguments.pre)
        for name, path in chain(made, ((file.stem, file) for file in arguments.files)):
            try:
                found = compare(path, texts)
            except UnsupportedModelError as error:
                print(f"| {name} | refused: {str(error)[:90]} | | | |", flush=True)
                continue
            num_different += found.num_different
            counts = len(found.ids), len(found.texts), len(found.ends)
            print(f"| {name} | {found.num_texts} | {counts[0]} | {counts[1]} | {counts[2]} |",
                  flush=True)  # fmt: skip
            for what in (found.ids, found.texts):
                for text, own, their in what[: arguments.show]:
                    print(f"    {text!r}\n      ours   {own}\n      theirs {their}")
            if arguments.show and found.ends:
                print(f"    ends {found.ends}")
    return 1 if num_different else 0


if __name__ == "__main__":
    sys.exit(main())
