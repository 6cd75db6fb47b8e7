"""`Generator`, the callable for Ray Data: columns in, columns out, errors as rows.

Nightly, a real `map_batches` runs.
"""

from __future__ import annotations

from typing import Any

import pytest

from pagespec import LLM, InvalidInputError, SamplingParams
from tests.distributed.replicas import ray_cluster
from tests.support.models import save_word_model

pa = pytest.importorskip("pyarrow")

from pagespec.distributed.ray import Generator  # noqa: E402

SETTINGS = {"num_blocks": 200, "compile": "eager"}
NEW = {
    "generated_text",
    "generated_tokens",
    "finish_reason",
    "num_input_tokens",
    "num_generated_tokens",
    "error",
}
ROWS: list[dict[str, Any]] = [
    {"name": "a", "prompt": "word1 word2"},
    {"name": "b", "prompt_token_ids": [5, 6, 7], "sampling_params": {"max_tokens": 3}},
    {"name": "c", "messages": [{"role": "user", "content": "word9"}]},
    {"name": "d", "prompt": "word1", "sampling_params": {"temperature": 0.5, "seed": 2**40 + 1}},
    {"name": "e", "prompt": ""},
    {"name": "f"},
    {"name": "g", "prompt": "word1", "prompt_token_ids": [1]},
    {"name": "h", "prompt": "word1", "sampling_params": {"max_tokens": -1}},
]
BAD = {"e": "empty", "f": "exactly one", "g": "exactly one", "h": "max_tokens"}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_word_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def generator(model: str) -> Generator:
    return Generator(model, sampling_params={"temperature": 0, "max_tokens": 5}, **SETTINGS)


@pytest.fixture(scope="module")
def expected(model: str) -> dict[str, list[int]]:
    llm = LLM(model, **SETTINGS)
    greedy = SamplingParams(temperature=0, max_tokens=5)
    asked = {
        "a": ("word1 word2", greedy),
        "b": ([5, 6, 7], SamplingParams(temperature=0, max_tokens=3)),
        "c": (llm.read_messages(ROWS[2]["messages"]), greedy),
        "d": ("word1", SamplingParams(temperature=0.5, seed=2**40 + 1, max_tokens=5)),
    }
    results = llm.generate_iter(asked.values())
    return {name: r.outputs[0].token_ids for name, r in zip(asked, results, strict=True)}


def check(rows: list[dict[str, Any]], expected: dict[str, list[int]]) -> None:
    for row in rows:
        assert set(row) >= NEW
        if row["name"] in BAD:
            assert BAD[row["name"]] in row["error"]
            assert {row[name] for name in NEW - {"error"}} == {None}
            continue
        assert row["error"] is None
        assert list(row["generated_tokens"]) == expected[row["name"]]
        assert row["num_generated_tokens"] == len(expected[row["name"]])
        assert row["finish_reason"] == "length"
        assert row["generated_text"].strip().startswith("word")
    by_name = {row["name"]: row for row in rows}
    assert [by_name[n]["num_input_tokens"] for n in "abd"] == [2, 3, 1]
    assert sorted(by_name) == sorted(row["name"] for row in ROWS)


def test_a_table_gains_columns_and_a_bad_row_fails_alone(
    generator: Generator, expected: dict[str, list[int]]
) -> None:
    names = {name: None for row in ROWS for name in row}
    table = generator(pa.Table.from_pylist([names | row for row in ROWS]))
    check(table.to_pylist(), expected)
    assert table.schema.field("generated_tokens").type == pa.list_(pa.int64())
    only_good = generator(pa.Table.from_pylist(ROWS[:1]))
    again = generator(only_good)  # its own columns are replaced
    assert again.schema == only_good.schema
    assert only_good.schema.field("error").type == pa.string()


def test_columns_of_numpy_arrays_whose_integers_became_floats(
    generator: Generator, expected: dict[str, list[int]]
) -> None:
    np = pytest.importorskip("numpy")
    params = [{"max_tokens": 3.0, "temperature": float("nan")}, None]
    columns = {
        "name": np.array(["b", "a"]),
        "prompt_token_ids": np.array([np.array([5, 6, 7]), None], dtype=object),
        "prompt": np.array([None, "word1 word2"], dtype=object),
        "sampling_params": np.array(params, dtype=object),
    }
    found = generator(columns)
    assert found["generated_tokens"] == [expected["b"], expected["a"]]
    assert found["error"] == [None, None]


def test_rows_without_a_seed_differ(generator: Generator) -> None:
    hot = {"temperature": 3.0, "max_tokens": 8}
    rows = [{"prompt": "word1", "sampling_params": hot}] * 6
    answers = generator(pa.Table.from_pylist(rows)).column("generated_text").to_pylist()
    assert len(set(answers)) > 1


def test_what_the_constructor_refuses(model: str) -> None:
    with pytest.raises(InvalidInputError, match="max_token'"):
        Generator(model, sampling_params={"max_token": 3})
    with pytest.raises(InvalidInputError, match="sampling_params"):
        Generator(model, sampling_params=[1])  # type: ignore[arg-type]


def test_another_batch_format_is_refused(generator: Generator) -> None:
    with pytest.raises(InvalidInputError, match='batch_format="pyarrow"'):
        generator([{"prompt": "a"}])


ASKED: dict[str, Any] = {"max_tokens": 4, "n": 3, "seed": 5, "temperature": 1.5}


def answers_of(model: str, **asked: Any) -> list[Any]:
    (output,) = LLM(model, **SETTINGS).generate("word1 word2", SamplingParams(**asked))
    return [output, *output.outputs]


def test_all_continuations_are_returned_as_lists(model: str) -> None:
    several = Generator(model, sampling_params=ASKED, **SETTINGS)
    rows = [
        {"prompt": "word1 word2", "sampling_params": None},
        {"prompt": "word1 word2", "sampling_params": {"n": 1, "max_tokens": None}},
        {"prompt": "", "sampling_params": {"n": None, "max_tokens": None}},
        {"prompt": "word1 word2", "sampling_params": {"n": 2, "max_tokens": 2}},
    ]
    table = several(pa.Table.from_pylist(rows))
    _, *answers = answers_of(model, **ASKED)
    assert len({tuple(answer.token_ids) for answer in answers}) > 1
    all_of, one, refused, two = table.to_pylist()
    assert all_of["generated_text"] == [answer.text for answer in answers]
    assert all_of["generated_tokens"] == [answer.token_ids for answer in answers]
    assert all_of["finish_reason"] == [answer.finish_reason for answer in answers]
    assert all_of["num_generated_tokens"] == [len(answer.token_ids) for answer in answers]
    assert (all_of["num_input_tokens"], all_of["error"]) == (2, None)
    assert one["generated_tokens"] == [answers[0].token_ids]
    assert refused["generated_text"] is None
    assert "empty" in refused["error"]
    assert two["generated_tokens"] == [answer.token_ids[:2] for answer in answers[:2]]
    assert table.schema.field("generated_text").type == pa.list_(pa.string())
    assert several(table.slice(2, 1)).schema.types == several(table.slice(0, 1)).schema.types
    columns = several({"prompt": ["word1 word2"]})
    assert columns["generated_tokens"] == [[answer.token_ids for answer in answers]]


@pytest.mark.parametrize("n", [1, 2])
def test_log_probabilities_that_are_asked_for_are_returned(model: str, n: int) -> None:
    asked = {**ASKED, "n": n, "logprobs": 2, "prompt_logprobs": 1}
    scored = Generator(model, sampling_params=asked, **SETTINGS)
    table = scored(pa.Table.from_pylist([{"prompt": "word1 word2"}, {"prompt": ""}]))
    row, refused = table.to_pylist()
    output, *answers = answers_of(model, **asked)

    def plain(places: Any) -> list[Any]:
        return [
            p and [(i, e.logprob, e.rank, e.decoded_token) for i, e in p.items()] for p in places
        ]

    def read(places: Any) -> list[Any]:
        names = ("token_id", "logprob", "rank", "decoded_token")
        return [p and [tuple(e[name] for name in names) for e in p] for p in places]

    own = [row["logprobs"]] if n == 1 else row["logprobs"]
    totals = [row["cumulative_logprob"]] if n == 1 else row["cumulative_logprob"]
    assert [read(places) for places in own] == [plain(answer.logprobs) for answer in answers]
    assert totals == [answer.cumulative_logprob for answer in answers]
    assert read(row["prompt_logprobs"]) == plain(output.prompt_logprobs)
    assert row["prompt_logprobs"][0] is None
    assert (refused["logprobs"], refused["prompt_logprobs"]) == (None, None)


@pytest.mark.parametrize(
    "asked", [{"n": 2, "temperature": 1.0}, {"logprobs": 1}, {"prompt_logprobs": 0}]
)
def test_a_row_that_asks_for_what_has_no_column_is_refused(
    generator: Generator, asked: dict[str, Any]
) -> None:
    rows = [{"prompt": "word1", "sampling_params": asked}]
    (row,) = generator(pa.Table.from_pylist(rows)).to_pylist()
    assert row["generated_text"] is None
    name = next(iter(asked))
    assert row["error"].startswith(f"{name} = {asked[name]}: must be ")
    assert "constructor" in row["error"]


@pytest.mark.nightly
@pytest.mark.parametrize("batch_format", ["pyarrow", "default"])
def test_map_batches_on_two_actors(
    model: str, expected: dict[str, list[int]], batch_format: str
) -> None:
    with ray_cluster(num_cpus=3) as ray:
        rows = ray.data.from_items(ROWS, override_num_blocks=4).map_batches(
            Generator,
            fn_constructor_kwargs={
                "model": model,
                "sampling_params": {"temperature": 0, "max_tokens": 5},
                **SETTINGS,
            },
            compute=ray.data.ActorPoolStrategy(size=2),
            batch_size=2,
            batch_format=batch_format,
        )
        found = rows.take_all()
    check(found, expected)
