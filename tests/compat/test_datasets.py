"""Prompts of ``pagespec.benchmarks.datasets``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from pagespec import InvalidInputError
from pagespec.benchmarks.datasets import SampleRequest, add_dataset_parser, get_samples
from pagespec.utils.argparse_utils import FlexibleArgumentParser


class Letters:
    """A tokenizer whose tokens are the letters a to z; 26 is special."""

    all_special_ids = (26,)

    def __len__(self) -> int:
        return 27

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        assert not add_special_tokens
        return [ord(one) - ord("a") for one in text]

    def decode(self, ids: list[int]) -> str:
        return "".join(chr(ord("a") + one) for one in ids)

    def apply_chat_template(self, messages: list[dict[str, str]], **given: bool) -> str:
        assert given == {"add_generation_prompt": True, "tokenize": False}
        return f"user{messages[0]['content']}"


def samples(*arguments: str) -> list[SampleRequest]:
    parser = FlexibleArgumentParser()
    add_dataset_parser(parser)
    return get_samples(parser.parse_args(arguments), Letters())


def written(folder: Path, value: Any, name: str = "file.json") -> str:
    path = folder / name
    path.write_text(value if isinstance(value, str) else json.dumps(value))
    return str(path)


def test_random_prompts_have_the_wanted_tokens_and_share_a_prefix() -> None:
    given = ("--num-prompts", "5", "--random-input-len", "9", "--random-output-len", "3")
    found = samples(*given, "--random-prefix-len", "4")
    assert [one.request_id for one in found] == list("01234")
    assert {(len(one.prompt), one.prompt_len, one.expected_output_len) for one in found} == {
        (13, 13, 3)
    }
    assert len({one.prompt[:4] for one in found}) == 1
    assert len({one.prompt for one in found}) == 5
    assert found == samples(*given, "--random-prefix-len", "4")
    assert found != samples(*given, "--random-prefix-len", "4", "--seed", "1")
    assert "{" not in "".join(one.prompt for one in found)  # 26


def test_lines_of_a_file_are_messages_of_a_user(tmp_path: Path) -> None:
    lines = [{"prompt": "abc", "output_tokens": 7}, {"prompt": "de", "output_tokens": 8}]
    path = written(tmp_path, "\n".join(json.dumps(one) for one in lines))
    given = ("--dataset-name", "custom", "--dataset-path", path, "--disable-shuffle")
    found = samples(*given, "--num-prompts", "2", "--custom-output-len", "-1")
    assert [(one.prompt, one.prompt_len, one.expected_output_len) for one in found] == [
        ("userabc", 7, 7),
        ("userde", 6, 8),
    ]
    found = samples(*given, "--num-prompts", "4", "--skip-chat-template")
    assert [one.prompt for one in found[:2]] == ["abc", "de"]
    assert {one.prompt for one in found[2:]} <= {"abc", "de"}
    assert {one.expected_output_len for one in found} == {256}
    assert [one.request_id for one in found] == list("0123")
    assert len(samples(*given, "--num-prompts", "4", "--no-oversample")) == 2
    assert len(samples(*given, "--num-prompts", "1")) == 1


def test_short_and_long_conversations_are_left_out(tmp_path: Path) -> None:
    pairs = [("abcde", "fghijk"), ("abc", "fghijk"), ("a" * 1025, "fghi"), ("abcd", "b" * 2048)]
    turns = [[{"value": one}, {"value": two}] for one, two in pairs]
    path = written(tmp_path, [{"conversations": one} for one in (*turns, turns[0][:1])])
    given = ("--dataset-name", "sharegpt", "--dataset-path", path, "--no-oversample")
    [found] = samples(*given)
    assert (found.prompt, found.prompt_len, found.expected_output_len) == ("abcde", 5, 6)
    lengths = [one.expected_output_len for one in samples(*given, "--sharegpt-output-len", "9")]
    assert lengths == [9, 9]


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("custom", "{", "^dataset_path = .*: has text that is not JSON"),
        ("custom", '{"text": "a"}', '^dataset_path = .*must have "prompt"'),
        ("custom", '{"prompt": "a"}', "^dataset_path = .*output_tokens"),
        ("custom", "", "^dataset_path = .*no usable prompt"),
        ("sharegpt", '{"prompt": "a"}', '^dataset_path = .*must be a list of {"conversations"'),
        ("sharegpt", "[]", "^dataset_path = .*no usable prompt"),
    ],
)
def test_files_without_prompts_are_refused(
    tmp_path: Path, name: str, text: str, message: str
) -> None:
    path = written(tmp_path, text)
    with pytest.raises(InvalidInputError, match=message):
        samples("--dataset-name", name, "--dataset-path", path, "--custom-output-len", "-1")


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("--dataset-name custom", "^dataset_path = None: must be a file for custom"),
        ("--num-prompts 0", "^num_prompts = 0: must be an integer of 1 or more"),
        ("--random-prefix-len -1", "^random_prefix_len = -1: must be an integer of 0 or more"),
    ],
)
def test_values_are_refused_by_name(given: str, message: str) -> None:
    with pytest.raises(InvalidInputError, match=message):
        samples(*given.split())


def test_data_sets_of_the_hub_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        samples("--dataset-name", "hf")
    assert "invalid choice: 'hf' (choose from" in capsys.readouterr().err
