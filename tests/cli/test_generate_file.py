"""`pagespec generate --input`: one output row per line, valid or not; interrupting and resuming."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.support.cli_fakes import Desk, FakeLLM, FakeTokenizer, call, start_with


def test_an_interrupted_run_goes_on_and_ends_as_one_that_was_not(desk: Desk) -> None:
    desk.lines(*({"prompt": f"p{i}"} if i != 3 else "bad" for i in range(8)))
    desk.run_file()
    whole = desk.output.read_bytes()
    seeds = [params.seed for _, params in desk.llm.seen]
    # Every length: nothing written, mid-row, and exactly at a row's end.
    for size in range(0, len(whole), 7):
        desk.output.write_bytes(whole[:size])
        desk.run_file()
        assert desk.output.read_bytes() == whole
        done = whole[:size].count(b"\n")
        assert len(desk.llm.seen) == 8 - done - (done <= 3)
        assert [p.seed for _, p in desk.llm.seen] == seeds[len(seeds) - len(desk.llm.seen) :]


def test_lines_override_what_the_model_asks_for(desk: Desk) -> None:
    desk.llm.default_sampling = {"temperature": 0.3, "top_k": 5}
    desk.lines({"prompt": "a"}, {"prompt": "b", "temperature": 0.9})
    desk.run_file("--top-k", "3")
    found = [(params.temperature, params.top_k) for _, params in desk.llm.seen]
    assert found == [(0.3, 3), (0.9, 3)]
    other = desk.run_file("--top-k", "3", "--generation-config", "vllm")
    assert other.exit_code == 2
    assert "model or sampling flags differ from those of this run" in other.stderr


def test_ctrl_c_keeps_the_rows_so_far(desk: Desk) -> None:
    desk.lines(*({"prompt": f"p{i}"} for i in range(6)))
    desk.llm.stop_after = 2
    result = desk.run_file()
    assert result.exit_code == 130
    assert "run the same command to continue" in result.stderr
    assert [row["text"] for row in desk.rows()] == ["P0", "P1"]


def test_a_finished_output_loads_no_model(desk: Desk) -> None:
    desk.lines({"prompt": "a"}, {"prompt": "b"})
    desk.run_file()
    desk.started.clear()
    result = desk.run_file()
    assert result.exit_code == 0
    assert "keeping 2 of 2 rows" in result.stderr
    assert not desk.started


def _other_input(desk: Desk) -> list[str]:
    desk.lines({"prompt": "other"}, {"prompt": "b"})
    return []


def _fewer_lines(desk: Desk) -> list[str]:
    desk.lines({"prompt": "a"})
    return []


def _foreign_file(desk: Desk) -> list[str]:
    desk.output.write_text("my thesis\nwithout a newline at its end")
    return []


def _foreign_tail(desk: Desk) -> list[str]:
    desk.output.write_text("my thesis")
    return []


def _shuffled(desk: Desk) -> list[str]:
    desk.output.write_text("".join(reversed(desk.output.read_text().splitlines(True))))
    return []


def _other_flag(_: Desk) -> list[str]:
    return ["--temperature", "0.3"]


@pytest.mark.parametrize(
    "change", [_other_input, _fewer_lines, _foreign_file, _foreign_tail, _shuffled, _other_flag]
)
def test_an_output_of_another_run_is_refused_untouched(desk: Desk, change: Any) -> None:
    desk.lines({"prompt": "a"}, {"prompt": "b"})
    desk.run_file()
    options = change(desk)
    before = desk.output.read_bytes()
    result = desk.run_file(*options)
    assert result.exit_code == 2
    assert len(result.stderr.splitlines()) == 1
    assert "--overwrite" in result.stderr
    assert desk.output.read_bytes() == before
    assert desk.run_file(*options, "--overwrite").exit_code == 0
    assert [row["index"] for row in desk.rows()] == list(range(len(desk.rows())))


def test_a_line_has_any_parameter_or_is_refused_by_its_name(desk: Desk) -> None:
    desk.lines(
        {"prompt": "a", "logit_bias": {"5": 2}, "bad_words": ["x"], "min_tokens": 1},
        {"prompt": "b", "guided_decoding": {"a": 1}},
        {"prompt": "c", "guided_decoding": None, "detokenize": False},
    )
    assert desk.run_file().exit_code == 1
    assert "guided_decoding = {'a': 1}: is not supported" in desk.rows()[1]["error"]
    first, last = (params for _, params in desk.llm.seen)
    assert (first.logit_bias, first.bad_words, first.min_tokens) == ({5: 2.0}, ["x"], 1)
    assert last.detokenize is False


def test_the_input_is_never_the_output(desk: Desk) -> None:
    desk.lines({"prompt": "a"})
    desk.output = desk.source
    result = desk.run_file("--overwrite")
    assert result.exit_code == 2
    assert desk.source.read_text() == '{"prompt": "a"}\n'


def test_two_runs_do_not_write_one_output(desk: Desk) -> None:
    fcntl = pytest.importorskip("fcntl")
    desk.lines({"prompt": "a"})
    with desk.output.open("wb") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        result = desk.run_file()
    assert result.exit_code == 2
    assert "another run" in result.stderr


def test_a_missing_input_is_one_line(desk: Desk) -> None:
    result = desk.run_file()
    assert result.exit_code == 2
    assert "--input" in result.stderr
    assert not desk.output.exists()


def test_a_failing_load_leaves_the_output_as_it_was(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    desk.lines({"prompt": "a"}, {"prompt": "b"})
    desk.run_file()
    whole = desk.output.read_bytes()

    def refuse(model: str, **_: Any) -> None:
        raise OSError(f"{model}\nis not there")

    start_with(monkeypatch, refuse)
    result = desk.run_file("--overwrite")
    assert (result.exit_code, result.stderr) == (2, "pagespec: error: tiny is not there\n")
    assert desk.output.read_bytes() == whole


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
    assert second.priority == 0
    assert third == {"prompt": "c"}


def test_every_line_has_a_seed_of_its_own(desk: Desk) -> None:
    desk.lines(
        {"prompt": "a"}, {"prompt": "a", "seed": None}, {"prompt": "a", "seed": 0}, {"prompt": "a"}
    )
    assert desk.run_file("--seed", "7").exit_code == 0
    assert [params.seed for _, params in desk.llm.seen] == [7, 8, 0, 10]


def test_blank_lines_get_no_row_and_are_numbered(desk: Desk) -> None:
    """As the help says. However many there are, an interrupted run goes on at the right line."""
    help_text = " ".join(call("generate", "--help").output.split())
    assert "one row per non-blank line" in help_text
    a, b, c = (json.dumps({"prompt": name}) for name in "abc")
    desk.source.write_text(f"\n{a}\n\n \t\r\n{b}\n\nbad\n{c}\n\n")
    desk.run_file()
    assert [row["index"] for row in desk.rows()] == [1, 4, 6, 7]
    assert [params.seed for _, params in desk.llm.seen] == [1, 4, 7]
    whole = desk.output.read_bytes()
    ends = [size for size, byte in enumerate(whole, 1) if byte == ord("\n")]
    # Around each end of a row, and now and then within it.
    for size in sorted({*range(0, len(whole), 7), *ends[:-1], *(end - 1 for end in ends)}):
        desk.output.write_bytes(whole[:size])
        assert "keeping" in desk.run_file().stderr or not whole[:size].count(b"\n")
        assert desk.output.read_bytes() == whole


def test_several_answers_are_a_list_and_have_seeds_of_their_own(desk: Desk) -> None:
    desk.lines({"prompt": "a"}, {"prompt": "b", "n": 1}, {"prompt": "c"})
    desk.run_file("--n", "2", "--seed", "5")
    two, one, _ = desk.rows()
    assert [answer["text"] for answer in two["outputs"]] == ["A", "A!"]
    assert two["num_prompt_tokens"] == 1
    assert "text" not in two
    assert (one["text"], "outputs" in one) == ("B", False)
    assert [params.seed for _, params in desk.llm.seen] == [5, 7, 9]


def test_raw_prompts_of_a_file_are_said_unless_it_was_chosen(desk: Desk) -> None:
    desk.llm = FakeLLM(FakeTokenizer())
    desk.lines({"prompt": "a"})
    said = "prompts are passed as they are, without the chat template; --chat uses it"
    assert said in desk.run_file().stderr
    for flag in ("--raw", "--chat"):
        assert "chat template" not in desk.run_file(flag, "--overwrite").stderr
