"""The files of the server's page: HTTP headers, and no resources from other hosts."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path

import pytest

from pagespec import AsyncLLM
from pagespec.server import page_files
from pagespec.server.app import create_app
from tests.support.content_llm import content_llm
from tests.support.server import client

FOLDER = Path(page_files.__file__).with_name("page")


def test_all_files_are_served_and_may_load_nothing_from_elsewhere() -> None:
    async def main() -> None:
        engine = AsyncLLM(content_llm())
        async with client(create_app(engine)) as http:
            for path in ["/", *(f"/page/{file.name}" for file in FOLDER.iterdir())]:
                answer = await http.get(path)
                assert answer.status_code == 200
                rules = dict(
                    rule.split(" ", 1)
                    for rule in answer.headers["content-security-policy"].split("; ")
                )
                assert rules["default-src"] == "'none'"
                assert {*rules.values()} == {"'none'", "'self'"}
                assert answer.headers["x-content-type-options"] == "nosniff"
                assert answer.headers["cache-control"] == "no-cache"
            palette = await http.get("/page/palette.css")
            assert "--owned" in palette.text
            for path in ("/page/nothing.js", "/page/../app.py", "/page/%2e%2e%2fapp.py"):
                assert (await http.get(path)).status_code == 404
        await engine.shutdown()

    asyncio.run(main())


@pytest.mark.parametrize("path", sorted(FOLDER.iterdir()), ids=lambda path: path.name)
def test_a_file_names_only_files_of_the_page(path: Path) -> None:
    text = path.read_text().replace("http://www.w3.org/2000/svg", "")
    assert "//" not in re.sub(r"(^|\s)// .*", "", text), "an address"
    for name in re.findall(r'(?:from "\./|(?:src|href)="page/)([^"]+)"', text):
        assert name == "palette.css" or (FOLDER / name).exists()


def test_every_colour_is_the_palettes() -> None:
    """Except the picture in the tab, and the shadow behind a dialog."""
    style = (FOLDER / "style.css").read_text()
    assert re.findall(r"#[0-9a-f]{3,8}\b|rgb\([^)]*\)", style) == ["rgb(0 0 0 / 45%)"]
    palette = page_files._PALETTE.read_text()
    for path in FOLDER.iterdir():
        for name in re.findall(r"var\((--[\w-]+)\)|\"(--[\w-]+)\"", path.read_text()):
            variable = name[0] or name[1]
            assert f"{variable}:" in palette + style, f"{path.name}: {variable}"
