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
# In these tests every model is the random one: they generate much, and read no answer.
TINY = (
    "tests/entrypoints/llm/test_struct_output_generate.py::test_structured_output[",
    "tests/entrypoints/llm/test_struct_output_generate.py::test_structured_output_auto_mode",
    "tests/entrypoints/openai/chat_completion/test_completion_with_function_calling.py",
    "tests/entrypoints/openai/chat_completion/test_logprob_token_ids.py",
    "tests/entrypoints/openai/completion/test_shutdown.py",
    "tests/entrypoints/openai/completion/test_token_in_token_out.py",
    "tests/entrypoints/openai/models",
    "tests/entrypoints/openai/responses",
    "tests/entrypoints/openai/test_async_tokenization.py",
    "tests/entrypoints/openai/test_chunked_prompt.py",
    "tests/entrypoints/openai/test_uds.py",
    "tests/entrypoints/serve",
    "tests/samplers/test_beam_search.py::test_beam_search_with_concurrency_limit",
    "tests/v1/determinism",
    "tests/v1/e2e",
    "tests/v1/engine",
    "tests/v1/sample",
)
# These take the smallest model of any kind, and use nothing of its kind.
ANY_MODEL = ("tests/entrypoints/serve/instrumentator/test_optional_middleware.py",)
# These read the answers of a base model, so it is SmolLM2, too.
READ = (
    "tests/detokenizer/test_stop_reason.py",
    "tests/v1/sample/test_sampling_params_e2e.py",
)
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
