"""`pagespec generate --input`, interrupted, resumed, or pointed at the wrong file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from pagespec.cli import make_llm
from tests.support.cli_fakes import Desk, FakeLLM


@pytest.fixture
def desk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Desk:
    return Desk(tmp_path, monkeypatch)


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


def test_ctrl_c_keeps_the_rows_so_far(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    desk.lines(*({"prompt": f"p{i}"} for i in range(6)))
    monkeypatch.setattr(FakeLLM, "stop_after", 2)
    result = desk.run_file()
    assert result.exit_code == 130
    assert "goes on from here" in result.stderr
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

    monkeypatch.setattr(make_llm, "make_llm", refuse)
    result = desk.run_file("--overwrite")
    assert (result.exit_code, result.stderr) == (2, "pagespec: error: tiny is not there\n")
    assert desk.output.read_bytes() == whole
