"""Test files that cannot apply, found without starting them.

Such a file imports names of vLLM, and pagespec has none of these. It starts no server and uses
none of the runners, so each of its tests is about what it imports. Or each request that it makes
is one of the Responses API.
"""

from __future__ import annotations

import ast
import re
from collections import Counter
from pathlib import Path

from . import own_names, stand_in
from .expected import NOT_APPLICABLE, WHOLE_FILE, Result

# What a test reaches pagespec by without an import from vllm.
_DOORS = re.compile(r"RemoteOpenAIServer|[Vv]llm_?[Rr]unner|\bclient\b|\bserver\b")


# The one endpoint that each test of a file calls. A test without arguments has no client.
_RESPONSES = re.compile(r"\.responses\.(create|parse|retrieve)|/v1/responses")
_OTHERS = re.compile(r"\.(chat|completions|embeddings|models)\.|/v1/(?!responses)|def test_\w+\(\)")


def unapplied(stage: Path, name: str) -> Result | None:
    """The result of a file that is not started; None if the file has to run.

    Its tests are counted by their functions, without parameters.
    """
    text = (stage / name).read_text()
    tree = ast.parse(text)
    num_tests = sum(
        isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name.startswith("test")
        for node in ast.walk(tree)
    )
    names = [each for each in _imported(tree) if each not in own_names.NAMES]
    if _RESPONSES.search(text) and not _OTHERS.search(text):
        return Result(name, WHOLE_FILE, NOT_APPLICABLE, "Responses API", 0.0, "", num_tests)
    if not names or _DOORS.search(text) or any(map(_is_ours, names)):
        return None
    features = Counter(stand_in.feature_of(each) for each in names)
    ((reason, _), *_) = features.most_common(1)
    needs = " ".join(each.removeprefix("vllm.") for each in names)
    return Result(name, WHOLE_FILE, NOT_APPLICABLE, reason, 0.0, needs, num_tests)


def _imported(tree: ast.AST) -> list[str]:
    """Dotted names that a file imports from vllm."""
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and not node.level and node.module:
            found += [f"{node.module}.{each.name}" for each in node.names]
        elif isinstance(node, ast.Import):
            found += [each.name for each in node.names]
    return [each for each in found if each.partition(".")[0] == stand_in.PEER]


def _is_ours(name: str) -> bool:
    """Whether pagespec has a name, or has to have it."""
    if not stand_in.feature_of(name):
        return True
    module, _, attribute = name.rpartition(".")
    ours = stand_in.module_of_ours(module)
    try:
        return ours is not None and hasattr(ours, attribute)
    except ImportError:  # a name that pagespec refuses
        return False
