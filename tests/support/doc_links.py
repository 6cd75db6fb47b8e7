"""Checks links, anchors and paths of all Markdown files, and pages that error messages name.

``python -m tests.support.doc_links`` prints each broken one; ``--external`` lists the addresses of
other hosts, which are not fetched. Anchors are those of GitHub; the site makes the same.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from urllib.parse import unquote

ROOT = Path(__file__).resolve().parents[2]
_CODE_BLOCK = re.compile(r"^( *)(```+|~~~+).*?^\1\2 *$", re.DOTALL | re.MULTILINE)
_INLINE_CODE = re.compile(r"(`+)(?!`)(.+?)(?<!`)\1(?!`)", re.DOTALL)
_COMMENT = re.compile(r"<!--.*?-->", re.DOTALL)
_LINK = re.compile(r"\]\(\s*<?([^)\s>]+)>?(?:\s+\"[^\"]*\")?\s*\)")
_ATTRIBUTE = re.compile(r"<[a-z][^>]*?\s(?:src|srcset|href)=\"([^\"\s]+)[^\"]*\"")
_DEFINITION = re.compile(r"^\[[^\]]+\]:\s*(\S+)", re.MULTILINE)
_HEADING = re.compile(r"^#{1,6} +(.+?) *#*$", re.MULTILINE)
_ANCHOR = re.compile(r"<a [^>]*(?:id|name)=\"([^\"]+)\"")
_FOLDERS = "src|tests|spec|docs|benchmarks|examples|deploy"
_PATH = re.compile(rf"(?:{_FOLDERS})/[a-z0-9_./-]*")
# The changelog names files of its time, and the table of peer tests those of vLLM.
_OTHER_FILES = ("CHANGELOG.md", "tests/peer/expected.md")
_PAGE = re.compile(r"\bdocs/([a-z0-9_/-]+\.md)(#[\w-]+)?")


@dataclass(frozen=True)
class Link:
    """A link or a path in a file."""

    file: str
    line: int
    target: str

    @property
    def is_external(self) -> bool:
        """Whether it is an address of another host, or a page of the host beside the files."""
        return bool(re.match(r"[a-z][a-z0-9+.-]*:|\.\./\.\./actions/", self.target))


@cache
def files(*patterns: str) -> list[str]:
    """Files of the repository, as git lists them."""
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", *patterns],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    ).stdout.splitlines()
    return sorted({name for name in listed if (ROOT / name).exists()})


def _blank(match: re.Match[str]) -> str:
    return re.sub(r"[^\n]", " ", match[0])


def links_of(file: str, text: str) -> Iterator[Link]:
    """The links of a Markdown file, outside of code."""
    text = _COMMENT.sub(_blank, _CODE_BLOCK.sub(_blank, text))
    # A link's text may be code; its target is not.
    shown = _INLINE_CODE.sub(_blank, text)
    for pattern in (_LINK, _ATTRIBUTE, _DEFINITION):
        for match in pattern.finditer(shown):
            yield Link(file, shown.count("\n", 0, match.start()) + 1, match[1])


def paths_of(file: str, text: str) -> Iterator[Link]:
    """Paths of the repository in code font."""
    text = _CODE_BLOCK.sub(_blank, text)
    for match in _INLINE_CODE.finditer(text):
        if _PATH.fullmatch(match[2]):
            yield Link(file, text.count("\n", 0, match.start()) + 1, match[2])


def anchors_of(text: str) -> set[str]:
    """The anchors of a Markdown file."""
    text = _CODE_BLOCK.sub("", text)
    found: Counter[str] = Counter()
    anchors = set(_ANCHOR.findall(text))
    for heading in _HEADING.findall(text):
        slug = slug_of(heading)
        anchors.add(f"{slug}-{found[slug]}" if found[slug] else slug)
        found[slug] += 1
    return anchors


def slug_of(heading: str) -> str:
    """The anchor of a heading, as GitHub makes it."""
    heading = re.sub(r"!?\[([^\]]*)\]\([^)]*\)", r"\1", heading)
    heading = re.sub(r"<[^>]+>|`|\*", "", heading)
    return re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-")


@cache
def _anchors(path: Path) -> set[str]:
    return anchors_of(path.read_text(encoding="utf-8"))


def fault(link: Link) -> str:
    """What is wrong with a link inside the repository; empty if nothing is."""
    target, _, anchor = link.target.partition("#")
    here = ROOT / link.file
    if target.startswith("/"):
        return "an absolute path, which is none on the site"
    path = (here.parent / unquote(target)).resolve() if target else here
    if not path.is_relative_to(ROOT):
        return "is outside of the repository"
    if not path.exists():
        return "there is no such file"
    if anchor and path.suffix == ".md" and anchor not in _anchors(path):
        return "there is no such heading"
    return ""


def path_fault(link: Link) -> str:
    """What is wrong with a path from the root of the repository."""
    return "" if (ROOT / link.target).exists() else "there is no such file"


def named_pages() -> Iterator[Link]:
    """Pages of ``docs`` that texts in Python files name, as error messages do."""
    for file in files("*.py"):
        if file.startswith("tests/"):
            continue  # they have made-up names, too
        text = (ROOT / file).read_text(encoding="utf-8")
        for match in _PAGE.finditer(text):
            target = f"{ROOT / 'docs' / match[1]}{match[2] or ''}"
            yield Link(file, text.count("\n", 0, match.start()) + 1, target)


def broken() -> tuple[list[str], int, list[Link]]:
    """What is broken, the number of what was checked, and the links to other hosts."""
    found: list[str] = []
    external: list[Link] = []
    num_checked = 0
    for file in files("*.md"):
        text = (ROOT / file).read_text(encoding="utf-8")
        checks = [(link, fault) for link in links_of(file, text)]
        if file not in _OTHER_FILES:
            checks += [(link, path_fault) for link in paths_of(file, text)]
        for link, check in checks:
            num_checked += 1
            if link.is_external:
                external.append(link)
            elif reason := check(link):
                found.append(f"{link.file}:{link.line}: {link.target}: {reason}")
    for link in named_pages():
        num_checked += 1
        target, _, anchor = link.target.partition("#")
        shown = target.removeprefix(f"{ROOT}/")
        if not Path(target).exists():
            found.append(f"{link.file}:{link.line}: {shown}: there is no such page")
        elif anchor and anchor not in _anchors(Path(target)):
            found.append(f"{link.file}:{link.line}: {shown}#{anchor}: there is no such heading")
    return found, num_checked, external


if __name__ == "__main__":
    broken_links, num_links, external_links = broken()
    if "--external" in sys.argv[1:]:
        for target in sorted({link.target for link in external_links}):
            print(target)
    for line in broken_links:
        print(line)
    print(f"{num_links} links and paths, {len(broken_links)} broken", file=sys.stderr)
    sys.exit(bool(broken_links))
