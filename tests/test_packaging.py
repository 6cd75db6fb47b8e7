"""The contents of the wheel according to pyproject.toml; `nox -s wheel` builds and tests a real
one.

An editable install hides the error that a package is missing from the list.
"""

from __future__ import annotations

import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[1]


def test_every_folder_with_code_is_a_package_of_the_wheel() -> None:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    found = []
    for name, folder in settings["package-dir"].items():
        for path in {path.parent for path in (ROOT / folder).rglob("*.py")}:
            found.append(".".join([name, *path.relative_to(ROOT / folder).parts]))
            assert (path / "__init__.py").exists(), path
    assert sorted(found) == sorted(settings["packages"])
