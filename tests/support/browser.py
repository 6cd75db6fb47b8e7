"""Headless Chromium for tests of web pages: the fixture `browser` and the helper `open_page`.

`nox -s browser_tests` installs Playwright; the browser is the system's Chromium. Tests carry the
marker `browser`, which `nox -s tests` deselects. So they fail, rather than skip, if Playwright or
Chromium is missing.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

_NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")
OTHER_HOST = "elsewhere.test"
# No sandbox: CI runs as root. Nothing else may use the network.
_ARGUMENTS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    # Another host than this one, to a browser: so no secure origin without HTTPS.
    f"--host-resolver-rules=MAP {OTHER_HOST} 127.0.0.1",
]


def find_chromium() -> str:
    """Raises FileNotFoundError if none is installed."""
    for name in _NAMES:
        if path := shutil.which(name):
            return path
    raise FileNotFoundError(f"none of {', '.join(_NAMES)} is installed (apt-get install chromium)")


@contextmanager
def started_browser() -> Iterator[Browser]:
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=find_chromium(), args=_ARGUMENTS)
        try:
            yield browser
        finally:
            browser.close()


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """One for the tests of a file; each opens pages of its own."""
    with started_browser() as found:
        yield found


@contextmanager
def open_page(
    browser: Browser,
    address: str | Path,
    *,
    theme: str = "light",
    width: int = 1280,
    height: int = 760,
) -> Iterator[Page]:
    """The page at an address or in a file. An error in its scripts fails the test; so does a
    request to another host than the page's own.

    Args:
        theme: "light" or "dark": what the reader's system prefers.
    """
    url = address.resolve().as_uri() if isinstance(address, Path) else address
    context = browser.new_context(
        viewport={"width": width, "height": height},
        color_scheme="dark" if theme == "dark" else "light",
    )
    page = context.new_page()
    errors: list[str] = []
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.on(
        "request",
        lambda request: _is_own(request.url, url) or errors.append(f"requests {request.url}"),
    )
    try:
        page.goto(url)
        yield page
        assert not errors, errors
    finally:
        context.close()


def _is_own(asked: str, page: str) -> bool:
    return asked.startswith(("data:", "blob:")) or asked.split("/")[:3] == page.split("/")[:3]
