"""Hooks of MkDocs: what differs between Markdown in the repository and pages of the site.

``PUBLISHED`` has the documents outside of ``docs`` that are pages of the site. A link to any other
file of the repository becomes its path in code font. A ``<picture>`` with a dark and a light image
becomes two images, of which the theme shows one.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parents[2]
# By path in the repository: the page in the site.
PUBLISHED = {
    "CHANGELOG.md": "changelog.md",
    "spec/README.md": "properties.md",
}
_SOURCES = {page: source for source, page in PUBLISHED.items()}

_CODE = re.compile(
    r"^( *)(```+|~~~+).*?^\1\2 *$|(`+)(?!`).+?(?<!`)\3(?!`)", re.DOTALL | re.MULTILINE
)
_LINK = re.compile(r"(?<!!)\[((?:[^\[\]]|\[[^\]]*\])*)\]\(([^)\s#]+)((?:#[^)\s]*)?)\)")
_PICTURE = re.compile(
    r'<picture>\s*<source [^>]*dark\)" srcset="([^"]+)">\s*'
    r'<img alt="([^"]*)" src="([^"]+)">\s*</picture>'
)
_ITEM = re.compile(r" *(?:[-*]|\d+\.) ")


def on_files(files: Files, config: Any) -> Files:
    """Add the pages of ``PUBLISHED``."""
    for source, page in PUBLISHED.items():
        content = (ROOT / source).read_text(encoding="utf-8")
        files.append(File.generated(config, page, content=content))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Rewrite what Python-Markdown or the site would read otherwise than GitHub."""
    uri = page.file.src_uri
    source = _SOURCES.get(uri, f"docs/{uri}")
    # Code is put aside, and back where it was.
    aside: list[str] = []

    def put_aside(match: re.Match[str]) -> str:
        aside.append(match[0])
        return f"\0{len(aside) - 1}\0"

    def put_back(text: str) -> str:
        return re.sub("\0(\\d+)\0", lambda match: aside[int(match[1])], text)

    text = _CODE.sub(put_aside, markdown)
    text = _PICTURE.sub(r"![\2](\3#only-light)\n![\2](\1#only-dark)", text)
    text = _LINK.sub(lambda match: _link(match, source, uri, put_back), text)
    return put_back(_with_blank_lines_before_lists(text))


def _link(match: re.Match[str], source: str, uri: str, put_back: Any) -> str:
    """A link, from the page ``uri`` whose Markdown is at ``source`` in the repository."""
    text, target, anchor = match.groups()
    if re.match(r"[a-z]+:|/", target):
        return match[0]
    path = posixpath.normpath(posixpath.join(posixpath.dirname(source), target))
    page = PUBLISHED.get(path) or (path.removeprefix("docs/") if path.startswith("docs/") else None)
    if page is not None:
        relative = posixpath.relpath(page, posixpath.dirname(uri) or ".")
        return f"[{text}]({relative}{anchor})"
    if not (ROOT / path).exists():
        return match[0]  # MkDocs reports it
    name = put_back(text).strip("`")
    return f"`{path}`" if path.endswith(name) else f"{text} (`{path}`)"


def _with_blank_lines_before_lists(text: str) -> str:
    """On GitHub a list may follow a line of text at once."""
    lines: list[str] = []
    for line in text.split("\n"):
        before = lines[-1] if lines else ""
        is_first = _ITEM.match(line) and not line.startswith(" ") and before.strip()
        if is_first and not _ITEM.match(before) and not before.startswith((" ", "#", "|")):
            lines.append("")
        lines.append(line)
    return "\n".join(lines)
