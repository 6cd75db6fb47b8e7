"""Links and blocks of the documentation, and the programs that check them."""

from __future__ import annotations

import pytest

from tests.support.doc_commands.blocks import ROOT, blocks_of, deployed_commands, documents
from tests.support.doc_commands.check import commands_of, faults, is_install
from tests.support.doc_commands.run import run_all
from tests.support.doc_links import anchors_of, broken, links_of, slug_of


def test_links_and_paths_exist() -> None:
    found, num_checked, _ = broken()
    assert num_checked > 500
    assert not found, "\n".join(found)


def test_blocks_are_right_as_far_as_can_be_said_without_running_them() -> None:
    texts = {name: (ROOT / name).read_text(encoding="utf-8") for name in documents()}
    blocks = [block for name, text in texts.items() for block in blocks_of(name, text)]
    assert len(blocks) > 20
    deployed = list(deployed_commands())
    assert deployed
    blocks += deployed
    found = [f"{block.place}: {fault}" for block in blocks for fault in faults(block)]
    assert not found, "\n".join(found)


def test_markers() -> None:
    text = """
<!-- needs: gpu, time: 3 minutes -->
<!-- server: 8000 -->
```bash
# a comment
pagespec serve
```

<!-- fragment: of a program -->
```python
x = 1
```
```json
{}
```
"""
    server, fragment = blocks_of("a.md", text)
    assert (server.needs, server.server, server.line) == (("gpu", "time: 3 minutes"), 8000, 5)
    assert server.first_line == "pagespec serve"
    assert (fragment.fragment, fragment.language) == ("of a program", "python")


def test_excerpts_of_the_sources_need_no_marker() -> None:
    source = (ROOT / "src/params/checks.py").read_text(encoding="utf-8")
    lines = source[source.index("def is_int") :].splitlines()[:3]
    excerpt = "\n".join(("...", *(f"    {line}" for line in lines), "    ..."))
    text = f"```python\n{excerpt}\n```\n\n```python\nprint(is_int(41 + 1))\n```\n"
    first, second = blocks_of("a.md", text)
    assert first.fragment == "excerpt of src/params/checks.py"
    assert not second.fragment
    assert not list(faults(first))


@pytest.mark.parametrize(
    "marker", ["needs: money", "need: gpu", "fragment", "server: here", "needs: time: long"]
)
def test_an_unknown_marker_is_an_error(marker: str) -> None:
    (block,) = blocks_of("a.md", f"<!-- {marker} -->\n```bash\nls\n```\n")
    (found,) = faults(block)
    assert "unknown" in found


@pytest.mark.parametrize(
    ("language", "text", "fault"),
    [
        ("bash", "pagespec generate --prompt Hi --max-token 3", "--max-token"),
        ("bash", "pagespec generates --prompt Hi", "no command generates"),
        ("bash", "KEY=1 pagespec serve --port x", "should be a valid integer"),
        ("bash", "ls && python -m spec --no-such-thing", "no option --no-such-thing"),
        ("bash", "python -m benchmarks.flor", "no module benchmarks.flor"),
        ("bash", "python examples/nothing.py", "no file examples/nothing.py"),
        ("bash", ".venv/bin/nox -s lint testes", "no session testes"),
        ("bash", "if true; then", "syntax error"),
        ("python", "from pagespec import LMM", "no LMM"),
        ("python", "def f(:\n  pass", "invalid syntax"),
    ],
)
def test_faults_are_found(language: str, text: str, fault: str) -> None:
    (block,) = blocks_of("a.md", f"```{language}\n{text}\n```\n")
    (found,) = faults(block)
    assert fault in found


@pytest.mark.parametrize(
    "text",
    [
        'pagespec generate --prompt "a; b" --temperature 0 > answer.txt',
        "pagespec serve Qwen/Qwen3-0.6B --enforce-eager --gpu-memory-utilization 0.8",
        "pagespec trace view run.jsonl --perfetto -o run.json  # a comment",
        "pagespec --help",
        'cat > a.jsonl <<\'EOF\'\n{"prompt": "it\'s"}\nEOF\npagespec generate -i a.jsonl -o b',
        "python -m spec --scope ci",
        ".venv/bin/nox -s tests -- --no-such-session",
        "curl http://127.0.0.1:8000/v1/models | python -m json.tool",
    ],
)
def test_right_commands_have_no_faults(text: str) -> None:
    (block,) = blocks_of("a.md", f"```bash\n{text}\n```\n")
    assert not list(faults(block))


def test_commands_of_a_script() -> None:
    text = "A=1 pip install -q nox && nox -s \\\n  demo | tee log; ls # nothing\n"
    assert list(commands_of(text)) == [
        *(["A=1", "pip", "install", "-q", "nox"], ["nox", "-s", "demo"]),
        *(["tee", "log"], ["ls"]),
    ]
    assert is_install("pip install -e '.[gguf]'")
    assert is_install("python3 -m venv .venv")
    assert not is_install("pagespec serve")


def test_blocks_run() -> None:
    text = """
```bash
# what pages assume
wc -l prompts.jsonl > lines && test -e examples && python -c 'print(1)' > one
```
```python
x = int(open("one").read())
```
<!-- continues -->
```python
assert x == 1
raise ValueError("on purpose")
```
<!-- continues -->
```python
print("never")
```
<!-- needs: gpu -->
```bash
false
```
```bash
pip install nothing
```
<!-- server: 8765 -->
```bash
python -m http.server 8765
```
```bash
python -c 'import urllib.request as u; assert b"lines" in u.urlopen("http://127.0.0.1:8765").read()'
```
"""
    results = list(run_all(list(blocks_of("a.md", text)), timeout_s=60.0))
    statuses = ["run", "run", "failed", "failed", "skipped", "skipped", "run", "run"]
    assert [result.status for result in results] == statuses, results
    assert 'a.md", line 12' in results[2].detail
    assert "on purpose" in results[2].detail
    assert results[4].detail == "needs gpu"
    assert results[5].detail == "install"


def test_a_block_that_takes_too_long_fails() -> None:
    blocks = list(blocks_of("a.md", "```bash\nsleep 60\n```\n"))
    (result,) = run_all(blocks, timeout_s=0.2)
    assert result.status == "failed"
    assert "longer than 0.2 s" in result.detail


def test_anchors_are_those_of_github() -> None:
    assert slug_of("`/v1/completions`") == "v1completions"
    assert slug_of("Top-k & [top-p](x.md)") == "top-k--top-p"
    assert anchors_of("# A b\n## A b\n```\n# no\n```\n") == {"a-b", "a-b-1"}
    links = links_of("a.md", '[`x`](y.md#z) `[no](no.md)` ![](i.png)\n<img src="j.png">')
    assert [link.target for link in links] == ["y.md#z", "i.png", "j.png"]
