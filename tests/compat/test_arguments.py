"""``EngineArgs``: an object with the arguments of ``LLM``, also of vLLM, and their options."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import pytest

from pagespec import LLM, AsyncEngineArgs, AsyncLLM, EngineArgs, InvalidInputError, LLMEngine
from pagespec.compat.parser import FlexibleArgumentParser
from pagespec.engine.config import EngineConfig
from pagespec.params.declare import declared
from pagespec.params.foreign import ENGINE, SHORT
from tests.params.test_foreign import config_of


def args_of(*given: str, cls: type[EngineArgs] = EngineArgs) -> EngineArgs:
    parser = cls.add_cli_args(FlexibleArgumentParser())
    made: EngineArgs = cls.from_cli_args(parser.parse_args(given))
    return made


@pytest.mark.parametrize(("cls", "engine"), [(EngineArgs, LLM), (AsyncEngineArgs, AsyncLLM)])
@pytest.mark.parametrize("read", [vars, asdict])
def test_default_arguments_are_those_of_an_engine_without_any(
    monkeypatch: pytest.MonkeyPatch, cls: Any, engine: type, read: Any
) -> None:
    given = read(cls(model="m"))
    assert given.pop("model") == "m"
    assert config_of(monkeypatch, engine, **given) == EngineConfig()


def test_there_is_a_field_per_declared_argument_and_per_row_of_the_table() -> None:
    names = {one.name for one in fields(EngineArgs)}
    assert names == {"model", *declared(EngineConfig), *ENGINE}
    assert {one.name for one in fields(AsyncEngineArgs)} == names | {"max_num_requests"}


def test_given_arguments_reach_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    made = EngineArgs("m", enforce_eager=True, num_gpu_blocks_override=9, max_model_len=64)
    made.seed = 5
    given = {name: value for name, value in asdict(made).items() if name != "model"}
    config = config_of(monkeypatch, **given)
    assert (config.compile, config.num_blocks, config.max_model_len) == ("graph", 9, 64)
    assert config.seed == 5
    assert repr(made) == (
        "EngineArgs(model='m', max_model_len=64, seed=5, num_gpu_blocks_override=9, "
        "enforce_eager=True)"
    )


@pytest.mark.parametrize("cls", [LLM, LLMEngine, AsyncLLM])
def test_from_engine_args(cls: Any) -> None:
    with pytest.raises(InvalidInputError, match=r"^model = 'm/n/o'"):
        cls.from_engine_args(EngineArgs(model="m/n/o"))


def test_an_effect_that_is_not_supported_is_refused_by_the_engine() -> None:
    with pytest.raises(InvalidInputError, match=r"^enable_lora = True: .*merge"):
        LLM(**vars(EngineArgs(model="m", enable_lora=True)))


@pytest.mark.parametrize("path", [None, Path("/x.gguf")])
def test_the_embedded_model_is_the_default(
    monkeypatch: pytest.MonkeyPatch, path: Path | None
) -> None:
    monkeypatch.setattr("pagespec.compat.arguments.embedded_model_path", lambda: path)
    expected = None if path is None else "/x.gguf"
    assert EngineArgs().model == AsyncEngineArgs().model == args_of().model == expected
    assert args_of("--model", "m").model == "m"


def test_an_unknown_field_is_a_type_error() -> None:
    with pytest.raises(TypeError, match="max_num_seq"):
        EngineArgs(model="m", max_num_seq=5)


def test_two_objects_share_no_dict() -> None:
    one, other = EngineArgs(model="m"), EngineArgs(model="m")
    one.hf_overrides["x"] = 1
    assert other.hf_overrides == {}


def test_options_have_dashes_or_underscores_and_json_values() -> None:
    made = args_of(
        "--model=m",
        "--max_model_len",
        "64",
        "--max-num-seqs=8",
        "--enforce-eager",
        "--no-enable-prefix-caching",
        "--speculative_config",
        '{"method": "ngram"}',
        "--dtype",
        "half",
    )
    expected = EngineArgs(
        model="m",
        max_model_len=64,
        max_num_seqs=8,
        enforce_eager=True,
        enable_prefix_caching=False,
        speculative_config={"method": "ngram"},
        dtype="half",
    )
    assert vars(made) == vars(expected)


@pytest.mark.parametrize("name", ["async_scheduling", "overlap", "enable_prefix_caching"])
def test_a_switch_has_two_forms(name: str) -> None:
    flag = name.replace("_", "-")
    assert getattr(args_of(f"--{flag}"), name) is True
    assert getattr(args_of(f"--no_{name}"), name) is False


@pytest.mark.parametrize("short", sorted(SHORT))
def test_short_options(short: str) -> None:
    name = SHORT[short].removeprefix("--").replace("-", "_")
    assert getattr(args_of(short, "3"), name) == 3


def test_a_namespace_with_fewer_and_other_names() -> None:
    made = EngineArgs.from_cli_args(Namespace(model="m", seed=3, temperature=0.5))
    assert vars(made) == vars(EngineArgs(model="m", seed=3))


def test_a_plain_parser_has_the_options_too(capsys: pytest.CaptureFixture[str]) -> None:
    parser = AsyncEngineArgs.add_cli_args(ArgumentParser())
    assert parser.parse_args(["--max-num-requests", "7"]).max_num_requests == 7
    with pytest.raises(SystemExit):
        parser.parse_args(["--help"])
    assert "--max-num-requests VALUE" in capsys.readouterr().out


def test_words_that_are_no_options_are_left_as_they_are() -> None:
    parser = FlexibleArgumentParser(add_json_tip=False)
    parser.add_argument("--stop_word")
    parser.add_argument("rest", nargs="*")
    read = parser.parse_args(["--stop-word=a_b", "c_d", "--", "--e_f"])
    assert vars(read) == {"stop_word": "a_b", "rest": ["c_d", "--e_f"]}
    with pytest.raises(SystemExit):
        parser.parse_args(["--no_such_option"])
