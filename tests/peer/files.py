"""The test files of vLLM that run here. Each has a process of its own."""

from __future__ import annotations

from pathlib import Path

OFFLINE = (
    "tests/test_sampling_params.py",
    "tests/test_inputs.py",
    "tests/test_outputs.py",
    "tests/test_logprobs.py",
    "tests/detokenizer",
    "tests/entrypoints/llm",
    "tests/samplers",
    "tests/v1/sample",
    "tests/v1/e2e",
    "tests/v1/engine/test_async_llm.py",
    "tests/v1/engine/test_llm_engine.py",
    "tests/v1/determinism",
)
HTTP = ("tests/entrypoints/openai", "tests/entrypoints/serve")
# Every model of these is the random one: they generate thousands of tokens and read no text.
TINY = (
    "tests/v1/engine/test_async_llm.py",
    "tests/v1/engine/test_llm_engine.py",
    "tests/v1/e2e/general/test_async_scheduling.py",
    "tests/v1/e2e/general/test_context_length.py",
    "tests/v1/e2e/general/test_min_tokens.py",
    "tests/v1/sample/test_logprobs.py",
    "tests/v1/determinism/test_batch_invariance.py",
    "tests/v1/determinism/test_online_batch_invariance.py",
)
TINY_VARIABLE = "PEER_TINY_MODEL"
QUICK = (
    "examples/basic/offline_inference/basic.py",
    "tests/test_sampling_params.py",
    "tests/entrypoints/llm/test_generate.py",
    "tests/entrypoints/openai/completion/test_completion.py",
)


def test_files(stage: Path, chosen: tuple[str, ...]) -> list[str]:
    """The test files at or below the paths ``chosen``, relative to ``stage``.

    Raises:
        ValueError: there is no test file at a path.
    """
    found: list[str] = []
    for name in chosen:
        path = stage / name
        files = [path] if path.is_file() else sorted(path.rglob("test_*.py"))
        if not files:
            raise ValueError(f"{name}: vLLM's sources have no test file there")
        found += [file.relative_to(stage).as_posix() for file in files]
    return found
