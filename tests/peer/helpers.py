"""Names of its ``tests/utils.py`` that its text tests use; others become ``Missing``."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from .serving import RemoteOpenAIServer
from .stand_in import Missing

__all__ = [
    "ROCM_ENV_OVERRIDES",
    "ROCM_EXTRA_ARGS",
    "VLLM_PATH",
    "RemoteOpenAIServer",
    "check_answers",
    "create_new_process_for_each_test",
    "fork_new_process_for_each_test",
    "gpu_tier_mark",
    "large_gpu_mark",
    "large_gpu_test",
    "multi_gpu_marks",
    "multi_gpu_only",
    "multi_gpu_test",
    "prep_prompts",
    "requires_fp8",
    "single_gpu_only",
    "wait_for_rocm_memory_to_settle",
]

VLLM_PATH = Path.cwd()
ROCM_ENV_OVERRIDES: dict[str, str] = {}
ROCM_EXTRA_ARGS: list[str] = []
Test = Callable[..., Any]


def missing(name: str) -> Any:
    """Any other name of the file."""
    if name.startswith("__"):
        raise AttributeError(name)
    return Missing(f"vllm.tests.utils.{name}")


def create_new_process_for_each_test(_method: str | None = None) -> Callable[[Test], Test]:
    """Every file has a process of its own here; a test needs none."""
    return lambda test: test


def fork_new_process_for_each_test(test: Test) -> Test:
    return test


# The models that need a large GPU are replaced.
def large_gpu_mark(min_gb: int) -> pytest.MarkDecorator:
    return pytest.mark.skipif(False, reason=f"needs {min_gb} GiB")


def large_gpu_test(*, min_gb: int) -> Callable[[Test], Test]:
    return lambda test: test


requires_fp8 = pytest.mark.skipif(False, reason="needs FP8")


def multi_gpu_marks(*, num_gpus: int) -> list[pytest.MarkDecorator]:
    reason = f"not applicable: several GPUs ({num_gpus})"
    return [pytest.mark.skipif(num_gpus > 1, reason=reason)]


def multi_gpu_only(*, num_gpus: int = 2) -> Callable[[Test], Test]:
    (mark,) = multi_gpu_marks(num_gpus=num_gpus)
    return lambda test: mark(test)


multi_gpu_test = multi_gpu_only


def gpu_tier_mark(*, min_gpus: int = 1, max_gpus: int | None = None) -> list[Any]:
    return multi_gpu_marks(num_gpus=min_gpus)


def single_gpu_only(test: Test | None = None) -> Any:
    return test if test is not None else (lambda one: one)


def wait_for_rocm_memory_to_settle(*_: object, **__: object) -> None:
    pass


def prep_prompts(
    batch_size: int, ln_range: tuple[int, int] = (800, 1100)
) -> tuple[list[str], list[int], list[int]]:
    """Prompts of many assignments, the values to be recalled, and the places of these."""
    source = random.Random(1)
    prompts, answers, indices = [], [], []
    for _ in range(batch_size):
        index, length = source.randint(30, 90), source.randint(*ln_range)
        values = {k: source.randint(10, 99) for k in range(30, length)}
        lines = "".join(f"x{k} = {value}\n" for k, value in values.items())
        prompts.append(f"```python\n{lines}assert x{index} == ")
        answers.append(values[index])
        indices.append(index)
    return prompts, answers, indices


def check_answers(
    indices: list[int], answer: list[int], outputs: list[str], accept_rate: float = 0.7
) -> None:
    pairs = list(zip(answer, outputs, strict=True))
    right = sum(text.strip()[:2] == str(value) for value, text in pairs)
    assert right / len(pairs) >= accept_rate, f"{right} of {len(pairs)}, {indices}"
