"""Words and phrases that the project's prose leaves out, and the places that have them.

``python -m tests.support.prose [FILES]`` prints each place with what to write instead.

Prose is Markdown outside code (fences, inline code, link targets), and in Python comments,
docstrings and string literals that contain a space. Names in code are not prose.
"""

from __future__ import annotations

import io
import os
import re
import sys
import tokenize
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
FOLDERS = ("benchmarks", "deploy", "docs", "examples", "spec", "src", "tests")
SUFFIXES = (".md", ".py")
# Python 3.12 splits f-strings.
_STRINGS = (tokenize.STRING, getattr(tokenize, "FSTRING_MIDDLE", tokenize.STRING))
# Of a sentence in documents for users. The aim is 25.
MAX_NUM_WORDS = 35
# This table itself, and generated or foreign text.
LEFT_OUT = ("tests/peer/expected.md", "tests/support/prose.py", "tests/test_prose.py", "LICENSE")

_THINGS = (
    "tokens?|bytes|steps?|rows?|blocks?|requests?|times?|scales?|values?|"
    r"once|twice|ms|us|µs|s|[KMG]i?B|TB|\d[\d.,]*"
)
_UNITS = (
    "step|token|row|second|minute|request|layer|block|slot|group|head|core|channel|process|launch|"
    "warp|warpgroup|expert|position|replica|rank|key|client|connection|owner|day|hour"
)

# Colons and semicolons end a sentence's worth of reading, too.
_SENTENCE_END = r"[.:;?!](?=[\s)]|$)|\|| ?\n(?=[-*#|]|\d+\. )"


@dataclass(frozen=True)
class Banned:
    """A pattern that prose must not contain.

    Attributes:
        pattern: a regular expression, matched without regard to case.
        instead: what to write.
        where: prefix of the paths it applies to; empty for all.
    """

    pattern: str
    instead: str
    where: tuple[str, ...] = ("",)


# Code does not speak, ask or know, and has no age but in an order of arrival.
BANNED = (
    Banned(r"\b(nobody|somebody|anybody|everybody)\b", "name the subject"),
    Banned(r"\b(elder|eldest)\b", "older, oldest"),
    Banned(r"\bwhom\b", "name the subject"),
    Banned(r"\bwho\b", "which, that; or name the role", ("src/", "spec/", "tests/", "benchmarks/")),
    Banned(r"\b(asks|knows)\b", "a verb of the field: requests, calls, has, reads"),
    Banned(
        r"\b(is|are|was|were|be|been) (told|asked)\b", "receives, gets, is passed; is requested"
    ),
    Banned(r"\btold (?:4|5)\d\d\b", "gets status 4xx"),
    Banned(r"\basked for\b", "requested"),
    Banned(rf"\b(?:{_THINGS}) an? (?:{_UNITS})\b", "per: tokens per step, bytes per slot"),
    Banned(r"(?<!dot )(?<!outer )(?<!inner )(?<!Cartesian )(?<!cross )\bproducts?\b", "matmul"),
    Banned(r"\b(sitting|sittings)\b", "run, session"),
    Banned(r"\bmemory floors?\b|\bbeside (?:the|its|their) floors?\b", "roofline"),
    Banned(r"\bheld to\b", "checked against, tested against"),
    Banned(r"\bas ever\b", "as before, unchanged"),
    Banned(r"\b(laid|lay|lies)\b", "is stored, is at"),
    Banned(r"\bsmall worlds?\b", "small configurations"),
    Banned(r"\bthe rooms?\b|\bits rooms?\b", "package, module"),
    Banned(r"\bthe way of\b", "the path of"),
    Banned(r"\bnear them\b", "close to them; give the bound"),
    Banned(r"\btakes? no thought\b", "fast path"),
    Banned(r"\blooks? after\b", "handles"),
    Banned(r"\bso (?:is|are|was|were) (?:it|that|the|they)\b", "say it again in full"),
    Banned(r"\bcomes? to an end\b", "ends"),
    Banned(r"\b(is|are) for nobody\b", "is discarded"),
    Banned(
        r"\bin the midst\b|\bfor want of\b|\bwhoever\b|\btaken at (its|their) word\b", "rewrite"
    ),
    Banned(r"\b(gives|gave|given) away\b", "frees, discards"),
    Banned(r"\bhold(s|ing)? (it|them|others|all|up all|callers) up\b", "delays, blocks"),
    Banned(r"\bmeans? nothing here\b", "is ignored"),
    Banned(r"\bso long as\b", "while, as long as"),
    Banned(r"\b(?:all|others?|rest) go(?:es)? on\b", "continues"),
    Banned(r"\bmay be had\b|\bcannot be had\b|\bto be had\b", "is available"),
    Banned(r"\bin words\b", "as text"),
    Banned(r"\bat hand\b", "given, present"),
)


@dataclass(frozen=True)
class Place:
    """Where prose contains a banned pattern."""

    file: str
    line: int
    found: str
    instead: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line}: {self.found!r}; write: {self.instead}"


def prose_files() -> list[str]:
    """Markdown and Python files of the repository, by path; hidden folders are left out."""
    found = [path for path in ROOT.iterdir() if path.is_file()]
    for folder in FOLDERS:
        # A link to a folder, which a development environment may need, is not followed.
        for directory, folders, names in os.walk(ROOT / folder):
            folders[:] = [name for name in folders if name != "__pycache__"]
            found += [Path(directory) / name for name in names]
    paths = (path.relative_to(ROOT).as_posix() for path in found if path.suffix in SUFFIXES)
    return sorted(path for path in paths if path not in LEFT_OUT)


def find_places(names: Iterable[str]) -> list[Place]:
    """Every banned pattern in the prose of files."""
    places = []
    for name in names:
        text = (ROOT / name).read_text(encoding="utf-8")
        places += find_in_text(name, text)
    return places


def find_in_text(name: str, text: str) -> list[Place]:
    """Every banned pattern in the prose of one file's text.

    Args:
        name: the file's path, which decides how it is read and which patterns apply.
    """
    passages = _markdown_prose(text) if name.endswith(".md") else _python_prose(text)
    banned = [b for b in BANNED if name.startswith(b.where)]
    places = []
    for line, passage in passages:
        for entry in banned:
            for match in re.finditer(entry.pattern.replace(" ", r"\s"), passage, re.IGNORECASE):
                at = line + passage.count("\n", 0, match.start())
                found = " ".join(match.group().split())
                places.append(Place(name, at, found, entry.instead))
    return sorted(places, key=lambda place: place.line)


def _blank(match: re.Match[str]) -> str:
    return re.sub(r"[^\n]", "·", match.group())


def _without_fields(string: str) -> str:
    """An f-string without its expressions."""
    is_formatted = re.match(r"[rR]?[fF]", string)
    return re.sub(r"\{[^{}\n]*\}", _blank, string) if is_formatted else string


def _without_code(text: str) -> str:
    """Inline code, link targets and addresses replaced by dots, lines kept."""
    text = re.sub(r"(`+)(?!`).+?(?<!`)\1(?!`)", _blank, text, flags=re.DOTALL)
    text = re.sub(r"\]\([^)]*\)", _blank, text)
    return re.sub(r"https?://\S+", _blank, text)


def _markdown_prose(text: str) -> Iterator[tuple[int, str]]:
    text = re.sub(r"^( *)(```+|~~~+).*?^\1\2 *$", _blank, text, flags=re.DOTALL | re.MULTILINE)
    text = re.sub(r"<!--.*?-->|<[a-zA-Z/][^>]*>", _blank, text, flags=re.DOTALL)
    # A sentence may be wrapped, so paragraphs are searched whole: a newline is one blank.
    yield from _paragraphs(_without_code(text), 1)


def _paragraphs(text: str, first_line: int) -> Iterator[tuple[int, str]]:
    start = first_line
    for paragraph in re.split(r"\n[ \t]*\n", text):
        # A pattern's blank matches a wrapped line, with its indentation or comment sign.
        yield start, re.sub(r"\n[ \t]*(?:# ?)?", "\n", paragraph)
        start += paragraph.count("\n") + 2


def _python_prose(text: str) -> Iterator[tuple[int, str]]:
    comment: list[str] = []
    comment_line = 0
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            if comment and token.start[0] != comment_line + len(comment):
                yield comment_line, _without_code("\n".join(comment))
                comment = []
            if not comment:
                comment_line = token.start[0]
            comment.append(token.string.lstrip("#! "))
        elif token.type in _STRINGS and " " in token.string:
            yield from _paragraphs(_without_code(_without_fields(token.string)), token.start[0])
    if comment:
        yield comment_line, _without_code("\n".join(comment))


def find_long_sentences(name: str, text: str, max_num_words: int) -> list[Place]:
    """Sentences, list items and table cells of Markdown with more words than a limit."""
    places = []
    for line, passage in _markdown_prose(text):
        start = 0
        for end in [m.end() for m in re.finditer(_SENTENCE_END, passage)] + [len(passage)]:
            sentence = passage[start:end]
            words = re.findall(r"[^\s|*_#>-][^\s|]*", sentence)
            if len(words) > max_num_words:
                at = line + passage.count("\n", 0, start + len(sentence) - len(sentence.lstrip()))
                opening = " ".join(words[:6])
                places.append(
                    Place(name, at, opening, f"{len(words)} words; at most {max_num_words}")
                )
            start = end
    return places


if __name__ == "__main__":
    chosen = prose_files()
    if sys.argv[1:]:
        chosen = [name for name in chosen if name.startswith(tuple(sys.argv[1:]))]
    found_places = find_places(chosen)
    for long_name in (name for name in chosen if name.endswith(".md")):
        long_text = (ROOT / long_name).read_text(encoding="utf-8")
        found_places += find_long_sentences(long_name, long_text, MAX_NUM_WORDS)
    for found_place in found_places:
        print(found_place)
    print(f"{len(found_places)} places in {len({p.file for p in found_places})} files")
