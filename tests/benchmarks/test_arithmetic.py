"""The benchmarks' arithmetic: workloads, rooflines, idle time. No model, no GPU."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks import card
from benchmarks.card import CardRates
from benchmarks.compare import row
from benchmarks.latency import per_token
from benchmarks.model_size import ModelSize
from benchmarks.profiling import (
    _CPU_CATEGORIES,
    _GPU_CATEGORIES,
    Interval,
    StepProfile,
    advances,
    busy_time,
    idle_fraction,
    read_trace,
)
from benchmarks.roofline import latency_roofline, throughput_roofline
from benchmarks.startup import phases
from benchmarks.workload import LOADS, MODELS, Workload, make_workload, model_config

H100 = CardRates("H100", "of the design", 3.05e12, 798e12)


def size_of(model: str) -> ModelSize:
    return ModelSize.from_config(model_config(model))


# Workloads ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "num_prompt_tokens", "num_output_tokens"),
    [
        ("nano", 142_827, 133_966),
        ("nano32", 18_237, 15_177),
        ("1024", 578_009, 591_657),
        ("long", 262_144, 8_192),
    ],
)
def test_workloads_have_the_token_counts_of_the_peer(
    name: str, num_prompt_tokens: int, num_output_tokens: int
) -> None:
    workload = make_workload(name)
    assert workload.num_prompt_tokens == num_prompt_tokens
    assert workload.num_output_tokens == num_output_tokens
    assert workload.longest <= LOADS[name].max_model_len


def test_nano_draws_the_tokens_of_the_peers_script() -> None:
    # `bench_vllm.py --workload-only` prints these.
    workload = make_workload("nano")
    assert (len(workload.prompts), len(workload.prompts[0])) == (256, 964)
    assert workload.prompts[0][:5] == [6311, 6890, 663, 4242, 8376]
    assert workload.num_outputs[:5] == [845, 312, 607, 843, 500]


@pytest.mark.parametrize("model", MODELS)
def test_every_token_is_in_the_vocabulary(model: str) -> None:
    largest = max(max(prompt) for prompt in make_workload("nano32").prompts)
    assert largest < model_config(model)["vocab_size"]


# Rooflines ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("model", "workload", "tokens_per_second", "tolerance"),
    [
        ("0.6b", "nano", 26_270, 0.03),
        ("8b", "nano", 9_988, 0.03),
        ("0.6b", "long", 2_560, 0.03),
        # Given there as "about", without their arithmetic.
        ("0.6b", "nano32", 16_000, 0.08),
        ("0.6b", "1024", 28_000, 0.05),
    ],
)
def test_rooflines_are_those_of_the_design(
    model: str, workload: str, tokens_per_second: float, tolerance: float
) -> None:
    roofline = throughput_roofline(make_workload(workload), size_of(model), H100)
    assert roofline.tokens_per_second == pytest.approx(tokens_per_second, rel=tolerance)


@pytest.mark.parametrize(("model", "milliseconds"), [("0.6b", 0.391), ("8b", 4.965)])
def test_latency_rooflines_are_those_of_the_design(model: str, milliseconds: float) -> None:
    roofline = latency_roofline(Workload("one", [[1] * 128], [512]), size_of(model), H100)
    assert roofline.weights_s * 1e3 == pytest.approx(milliseconds, rel=0.005)


def test_a_roofline_counts_what_a_small_run_reads() -> None:
    size = ModelSize(1000, 100, kv_bytes_per_token=128, pair_operations=256, state_bytes=40)
    # The step that makes token 2 of 3 reads a context of 5 + 1, the next one 5 + 2.
    roofline = throughput_roofline(Workload("small", [[0] * 5, [0] * 4], [3, 1]), size, H100)
    assert roofline.kv_bytes == (6 + 7) * 128
    assert roofline.num_steps == 3
    assert roofline.weights_s == pytest.approx(3 * 1100 * 2 / 3.05e12)
    assert roofline.prefill_s == pytest.approx(2 * 1000 * 9 / 798e12)
    assert roofline.attention_s == pytest.approx((15 + 10) * 256 / 798e12)
    # Written behind two prompts; read and written by two decode steps of one request.
    assert roofline.states_s == pytest.approx((2 + 2 * 2) * 40 / 3.05e12)


def test_a_roofline_counts_the_experts_that_have_a_row() -> None:
    size = ModelSize(1000, 100, 64, 64, num_expert_weights=10, num_experts=4, top_k=2)
    assert size.num_weights_read(1) == 1100 + 2 * 10
    assert size.num_weights_read(2) == 1100 + 3 * 10
    assert size.num_weights_read(100) == pytest.approx(1100 + 4 * 10)
    roofline = throughput_roofline(Workload("small", [[0] * 5], [1]), size, H100)
    assert roofline.prefill_s == pytest.approx(2 * 1020 * 5 / 798e12)
    assert roofline.weights_s == pytest.approx(1120 * 2 / 3.05e12)
    active = size_of("30b-a3b")
    assert active.num_layer_weights_per_token == pytest.approx(2.74e9, rel=0.01)


def test_sizes_are_counted_in_a_models_modules() -> None:
    assert (size_of("8b").kv_bytes_per_token, size_of("8b").pair_operations) == (147_456, 589_824)
    latent = size_of("deepseek-v2-lite")
    assert latent.kv_bytes_per_token == 27 * (512 + 64) * 2
    assert latent.pair_operations == 27 * 2 * 16 * (192 + 128)
    assert (latent.num_experts, latent.top_k) == (64, 6)
    assert latent.num_expert_weights == 26 * 3 * 2048 * 1408
    recurrent = size_of("qwen3-next-8")
    assert recurrent.kv_bytes_per_token == 2 * 2 * 2 * 256 * 2
    assert recurrent.state_bytes == 6 * (32 * 128 * 128 * 4 + 3 * 8192 * 2)


@pytest.mark.parametrize(
    ("model", "billions"),
    [
        ("deepseek-v2-lite", 15.7),
        ("granite-4-h-tiny", 6.94),
        ("falcon-h1-7b", 7.59),
        ("nemotron-h-8b", 8.10),
    ],
)
def test_models_have_as_many_weights_as_their_checkpoints(model: str, billions: float) -> None:
    size = size_of(model)
    num_heads = 1 if model_config(model)["tie_word_embeddings"] else 2
    num_weights = (
        size.num_layer_weights
        + size.num_experts * size.num_expert_weights
        + num_heads * size.num_head_weights
    )
    assert num_weights == pytest.approx(billions * 1e9, rel=0.003)


def test_rates_are_measured_once_for_a_card_and_driver(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PAGESPEC_CACHE", str(tmp_path))
    found = iter([(1e12, 2e12), (3e12, 4e12), (5e12, 6e12), (7e12, 8e12)])
    identity = ["a card", "driver 1"]
    monkeypatch.setattr(card, "_measure", lambda: next(found))
    monkeypatch.setattr(card, "_identity", lambda: tuple(identity))
    first = card.rates_of_this_process()
    assert first == CardRates("a card", "driver 1", 1e12, 2e12) == card.rates_of_this_process()
    assert "a card (driver 1): 1.00 TB/s read, 2 TFLOP/s" in str(first)
    identity[1] = "driver 2"
    assert card.rates_of_this_process().read_bandwidth == 3e12
    assert card.rates_of_this_process(is_fresh=True).read_bandwidth == 5e12
    for file in (tmp_path / "card-rates").iterdir():
        file.write_text("damaged")
    assert card.rates_of_this_process().matrix_rate == 8e12


# Comparison -----------------------------------------------------------------------------------


def test_a_line_of_a_comparison_has_the_ratio_to_pagespec() -> None:
    columns = ["pagespec", "vLLM", "other"]
    values = {"pagespec": [3.0, 2.0, 1.0], "vLLM": [1.0]}
    line = row("rate", 4.0, values, columns, is_rate=True)
    assert line.split() == ["rate", "4", "50.0%", "2", "(1..3)", "1", "(1..1)", "2.00x", "-"]
    line = row("time", 1.0, values, columns, is_rate=False)
    assert line.split()[2:] == [
        "50.0%",
        "2.000",
        "(1.000..3.000)",
        "1.000",
        "(1.000..1.000)",
        "0.50x",
        "-",
    ]


# Times ----------------------------------------------------------------------------------------


def test_idle_fraction_counts_the_gaps_between_streams_once() -> None:
    intervals = [Interval(30, 40), Interval(0, 10), Interval(5, 20), Interval(6, 8)]
    assert busy_time(intervals) == 30
    assert idle_fraction(intervals) == pytest.approx(0.25)
    assert idle_fraction(intervals[1:]) == 0.0


@pytest.mark.parametrize("intervals", [[], [Interval(3, 3)]])
def test_idle_fraction_of_no_time_is_refused(intervals: list[Interval]) -> None:
    with pytest.raises(ValueError, match="no time"):
        idle_fraction(intervals)


@given(
    st.lists(
        st.tuples(st.integers(0, 60), st.integers(1, 20)).map(lambda t: Interval(t[0], sum(t))),
        min_size=1,
        max_size=12,
    )
)
def test_busy_time_is_the_size_of_the_union(intervals: list[Interval]) -> None:
    union = {t for i in intervals for t in range(int(i.begin), int(i.end))}
    assert busy_time(intervals) == len(union)


def event(name: str, category: str, begin: float, duration: float, tid: int = 7) -> dict:
    return {"ph": "X", "name": name, "cat": category, "ts": begin, "dur": duration, "tid": tid}


def test_a_trace_is_read_and_its_profile_adds_up(tmp_path: Path) -> None:
    trace = tmp_path / "trace.json"
    events = [
        event("gemm", "kernel", 0, 10),
        event("gemm", "kernel", 20, 10),
        event("attention", "kernel", 30, 50, tid=8),
        event("Memcpy HtoD", "gpu_memcpy", 95, 5),
        event("cudaGraphLaunch", "cuda_runtime", 80, 15),
        {"ph": "M", "name": "process_name"},
        event("linear", "cpu_op", 0, 10),
        event("addmm", "cpu_op", 0, 8),
        event("sample", "cpu_op", 5, 10, tid=9),
    ]
    trace.write_text(json.dumps({"traceEvents": events}))
    host = read_trace(trace, _CPU_CATEGORIES)
    assert [i.name for i in host] == ["linear", "sample"]
    profile = StepProfile(read_trace(trace, _GPU_CATEGORIES), num_steps=2, wall_s=1e-4)
    assert profile.by_name() == [("attention", 25, 0.5), ("gemm", 10, 1), ("Memcpy HtoD", 2.5, 0.5)]
    assert profile.summary() == pytest.approx(
        {
            "kernel_us_per_step": 37.5,
            "span_us_per_step": 50,
            "wall_us_per_step": 50,
            "idle_fraction": 0.25,
        }
    )
    assert "idle 25.00%" in str(profile)


def test_a_kernel_that_waits_counts_from_the_end_of_the_last() -> None:
    ran = [Interval(0, 10, "gemm"), Interval(1, 14, "norm"), Interval(2, 12, "short")]
    ran.append(Interval(20, 21, "gemm"))
    assert list(advances(ran)) == [("gemm", 10), ("norm", 4), ("short", 0), ("gemm", 1)]
    profile = StepProfile(ran, num_steps=1, wall_s=2.1e-5)
    assert profile.by_name() == [("gemm", 11, 2), ("norm", 4, 1), ("short", 0, 1)]
    assert profile.summary()["kernel_us_per_step"] == 15


def test_a_decode_token_leaves_the_prompt_out() -> None:
    every, decode = per_token([0.522], [0.011], 512)
    assert every == pytest.approx([0.522 / 512 * 1e3])
    assert decode == pytest.approx([1.0])


def test_the_phases_of_a_start_add_up() -> None:
    run = {
        "process_begin": 100.0,
        "called": 100.5,
        "imported": 103.0,
        "engine_ready": 110.0,
        "first_token": 110.5,
        "stats": {"startup_s": {"load": 1.0, "capture": 4.0}},
    }
    seconds = list(phases(run).values())
    assert seconds == pytest.approx([0.5, 2.5, 1.0, 4.0, 2.0, 0.5, 10.5])
    assert sum(seconds[:-1]) == pytest.approx(seconds[-1])
