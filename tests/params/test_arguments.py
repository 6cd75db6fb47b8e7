"""``LLM`` and ``AsyncLLM`` accept the declared arguments: help texts, type checkers, callers."""

from __future__ import annotations

import inspect
import os
import pydoc
import subprocess
import sys
from pathlib import Path

import pytest

import pagespec
from pagespec import LLM, AsyncLLM, InvalidInputError
from pagespec.engine.config import EngineConfig
from pagespec.params.declare import declared

PACKAGE = Path(pagespec.__file__).parent


@pytest.mark.parametrize("cls", [LLM, AsyncLLM])
def test_a_signature_has_names_types_and_defaults(cls: type) -> None:
    parameters = inspect.signature(cls).parameters
    assert next(iter(parameters)) == "model"
    assert parameters["model"].default is inspect.Parameter.empty
    assert parameters["max_num_seqs"].default == 64
    assert parameters["max_num_seqs"].annotation == "int"
    assert parameters["max_num_seqs"].kind is inspect.Parameter.KEYWORD_ONLY
    assert parameters["trace"].annotation == "str | os.PathLike[str] | None"
    assert ("max_num_requests" in parameters) == (cls is AsyncLLM)


@pytest.mark.parametrize("cls", [LLM, AsyncLLM])
def test_help_describes_every_argument(cls: type) -> None:
    shown = pydoc.plain(pydoc.render_doc(cls))
    assert "max_num_seqs: 'int' = 64" in shown
    for name in inspect.signature(cls).parameters:
        assert f"    {name}: " in shown, name
    assert "2048; on a GPU 8192" in shown


def test_every_field_is_declared() -> None:
    assert set(declared(EngineConfig)) == set(inspect.signature(EngineConfig).parameters)
    assert all(p.help.endswith(".") for p in declared(EngineConfig).values())


@pytest.mark.parametrize("cls", [LLM, AsyncLLM])
@pytest.mark.parametrize(
    ("name", "near"),
    [
        ("max_num_seq", "max_num_seqs"),
        ("max_model_length", "max_model_len"),
        ("tensor_paralel_size", "tensor_parallel_size"),
        ("kv_cache_type", "kv_cache_dtype"),
    ],
)
def test_an_unknown_argument_is_refused_with_the_nearest_names(
    cls: type, name: str, near: str
) -> None:
    with pytest.raises(InvalidInputError, match=f"^{name} = 5: .*{near}") as caught:
        cls("m", **{name: 5})
    assert isinstance(caught.value, TypeError)  # as Python's own
    assert (caught.value.field, caught.value.value) == (name, 5)


def test_an_argument_like_no_other_is_refused_by_its_name() -> None:
    with pytest.raises(InvalidInputError, match=r"^zzzz = 1: there is no such argument$"):
        LLM("m", zzzz=1)  # type: ignore[call-arg]


@pytest.mark.parametrize(("given", "text"), [((), "'model'"), (("m", "cpu"), "positional")])
def test_a_call_without_a_model_or_with_two_is_a_type_error(given: tuple[str], text: str) -> None:
    with pytest.raises(TypeError, match=text):
        LLM(*given)


@pytest.mark.parametrize("name", ["tool_call_format", "reasoning_format"])
def test_formats_are_checked_with_the_rest(name: str) -> None:
    with pytest.raises(InvalidInputError, match=f"^{name} = 'x': must be one of auto, none"):
        LLM("m", **{name: "x"})  # type: ignore[arg-type]


def test_an_llm_that_is_there_takes_no_arguments() -> None:
    there = object.__new__(LLM)
    for name, value in {"block_size": 8, "trace": os.devnull, "transparent": False}.items():
        with pytest.raises(InvalidInputError, match=f"^{name} = .*must be an argument of that LLM"):
            AsyncLLM(there, **{name: value})  # type: ignore[arg-type]


_SNIPPET = """
from pagespec import LLM, AsyncLLM
LLM("m"); LLM(model="m", max_num_seqs=3, memory_utilization=0.5, graph_batch_sizes=[1])
LLM("m", gpu_memory_utilization=0.5, on_logits=print, trace=None)
LLM("m", max_num_seq=3)
LLM("m", max_num_seqs="3")
LLM("m", dtype=16)
LLM("m", graph_batch_sizes=[0.5])
LLM()
AsyncLLM(LLM("m"), max_num_requests=3)
AsyncLLM("m", max_num_requests="3")
AsyncLLM("m", max_num_request=3)
"""
_SETTINGS = """
[mypy]
[mypy-torch.*,transformers.*,numpy.*,pagespec.build.*,pagespec.distributed.*,pagespec.kernels.*]
follow_imports = skip
"""


def test_a_type_checker_refuses_wrong_names_and_types(tmp_path: Path) -> None:
    (tmp_path / "snippet.py").write_text(_SNIPPET)
    (tmp_path / "mypy.ini").write_text(_SETTINGS)
    (tmp_path / "pagespec").symlink_to(PACKAGE)
    command = [sys.executable, "-m", "mypy", "--follow-imports=silent", "--no-incremental"]
    ran = subprocess.run(
        [*command, "--no-error-summary", "snippet.py"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=300,
    )
    found = [line.split(":", 3) for line in ran.stdout.splitlines() if ": error:" in line]
    assert [int(number) for _, number, *_ in found] == [5, 6, 7, 8, 9, 11, 12], ran.stdout
    texts = [text for *_, text in found]
    assert 'did you mean "max_num_seqs"' in texts[0]
    assert 'expected "int"' in texts[1]
    assert 'did you mean "max_num_requests"' in texts[-1]
