"""Other clients of the OpenAI API, if they are installed (``nox -s clients`` installs them)."""

from __future__ import annotations

import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from pagespec import LLM
from tests.support.chat_models import save_chat_model
from tests.support.scripted_llm import scripted_llm
from tests.support.server import serving

HERE = Path(__file__).parent
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Bern"}}\n</tool_call>'
SCRIPTS = {
    "use_litellm.py": ["litellm", "mcp"],
    "use_langchain.py": ["langchain_openai"],
    "use_ray.py": ["ray", "aiohttp"],
}


@pytest.mark.parametrize("name", SCRIPTS)
def test_it_finds_what_it_expects(name: str, tmp_path: Path) -> None:
    for package in SCRIPTS[name]:
        if find_spec(package) is None:
            pytest.skip(f"{package} is not installed")
    model = LLM(save_chat_model(tmp_path), max_num_seqs=8, num_blocks=200, compile="eager")
    script = scripted_llm("qwen3", ["Plain words.", CALL])
    with serving(model) as url, serving(script) as url_of_calls:
        command = [sys.executable, HERE / name, url]
        if name != "use_ray.py":
            command += [url_of_calls, "1"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert ": ok; it says" in done.stdout
