"""A real Ctrl-C: in the command line, and in a program that continues after it."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from pagespec import LLM, SamplingParams
from pagespec.engine.invariants import check_state
from pagespec.engine.plan import StepPlan
from tests.support.content_llm import answer_alone, content_llm
from tests.support.content_runner import TOKEN_STRIDE
from tests.support.models import tiny_model

GREEDY = ["--temperature", "0", "--max-tokens", "30000"]


@pytest.mark.parametrize("form", ["prompt", "input"])
def test_a_ctrl_c_ends_the_command_line_with_130_and_no_traceback(
    tmp_path: Path, form: str
) -> None:
    source = tmp_path / "in.jsonl"
    source.write_text('{"prompt": "abab", "ignore_eos": true}\n' * 3)
    question = ["--prompt", "abab", "--ignore-eos"]
    if form == "input":
        question = ["--input", str(source), "--output", str(tmp_path / "out.jsonl")]
    command = [sys.executable, "-m", "tests.cli.interrupted_cli", "generate", "-m", "x"]
    process = subprocess.Popen(
        [*command, *question, *GREEDY],
        stderr=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        text=True,
        cwd=Path(__file__).parents[2],
    )
    assert process.stderr is not None
    said = ""
    while not said.endswith("working\n"):  # after lines about the start
        line = process.stderr.readline()
        said += line
        assert line, said
    time.sleep(0.3)
    process.send_signal(signal.SIGINT)
    _, rest = process.communicate(timeout=60)
    assert process.returncode == 130, rest
    assert "Traceback" not in rest
    assert "interrupted" in rest


@contextmanager
def interrupted_after(delay_s: float) -> Iterator[None]:
    """A block that gets Ctrl-C then, and again each second: CPython drops what a finaliser raises,
    and the garbage of other tests may be collected just at that moment."""
    main = threading.main_thread().ident
    assert main is not None
    done = threading.Event()

    def interrupt(delay_s: float) -> None:
        while not done.wait(delay_s):
            signal.pthread_kill(main, signal.SIGINT)
            delay_s = 1.0

    thread = threading.Thread(target=interrupt, args=(delay_s,))
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


@pytest.mark.parametrize("depth", [0, 1, 2])
def test_generate_works_after_a_real_ctrl_c(depth: int) -> None:
    """Signals arrive where CPython looks for them, at moments of the machine's choice."""
    llm = content_llm(num_blocks=400, pipeline_depth=depth, max_num_seqs=4)
    params = SamplingParams(temperature=0.0, max_tokens=600, ignore_eos=True, seed=1)
    short = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True, seed=1)
    prompt = [0, TOKEN_STRIDE, 0]
    expected = answer_alone(llm, prompt, short)

    def generate_for_ever(delay_s: float) -> None:
        with interrupted_after(delay_s):
            while True:
                llm.generate([prompt] * 3, params, use_tqdm=False)

    handler = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        for i in range(15):
            with pytest.raises(KeyboardInterrupt):
                generate_for_ever(0.01 + i * 0.0011)
            outputs = llm.generate([prompt] * 2, short, use_tqdm=False)
            assert [o.outputs[0].token_ids for o in outputs] == [expected] * 2
            check_state(llm.engine.scheduler)
            assert not llm.engine.has_work
    finally:
        signal.signal(signal.SIGINT, handler)


@pytest.mark.parametrize("kind", [KeyboardInterrupt, SystemExit, GeneratorExit, MemoryError])
@pytest.mark.parametrize("where", ["dispatch", "collect", "on_token"])
def test_whatever_a_step_raises_the_next_call_is_served(
    kind: type[BaseException], where: str
) -> None:
    llm = content_llm(pipeline_depth=1)
    params = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True, seed=1)
    calls: list[StepPlan] = []

    def fail(*_: object, **__: object) -> bool:
        calls.append(None)  # type: ignore[arg-type]
        raise kind("said by the test")

    question: object = [0, TOKEN_STRIDE]
    stopped = SamplingParams(max_tokens=8, stop="zzz", ignore_eos=True, seed=1)
    target, name = llm.engine.runner, where
    if where == "on_token":
        target, name = llm.tokenizer, "decode"
    setattr(target, name, fail)
    with pytest.raises(BaseException, match="said by the test"):
        llm.generate(question, stopped, use_tqdm=False)
    assert calls
    delattr(target, name)
    output = llm.generate(question, params, use_tqdm=False)[0].outputs[0]
    assert output.token_ids == answer_alone(llm, [0, TOKEN_STRIDE], params)
    check_state(llm.engine.scheduler)


@pytest.mark.parametrize("overlap", [False, True])
def test_a_real_model_answers_the_same_after_an_interrupt(overlap: bool) -> None:
    llm = LLM(tiny_model("llama"), num_blocks=40, overlap=overlap, compile="eager")
    params = SamplingParams(temperature=0.0, max_tokens=12)
    prompts = [[5 + i] * 20 for i in range(3)]
    expected = [o.outputs[0].token_ids for o in llm.generate(prompts, params, use_tqdm=False)]
    forward, num_calls = llm.engine.runner._forward, 0

    def interrupted(inputs: object) -> object:
        nonlocal num_calls
        num_calls += 1
        logits = forward(inputs)
        if num_calls == 5:
            raise KeyboardInterrupt
        return logits

    llm.engine.runner._forward = interrupted
    with pytest.raises(KeyboardInterrupt):
        llm.generate([[9] * 20, *prompts], params, use_tqdm=False)
    outputs = llm.generate(prompts, params, use_tqdm=False)
    assert [o.outputs[0].token_ids for o in outputs] == expected
    assert [o.metrics.num_cached_tokens for o in outputs] == [0, 0, 0], "the cache was dropped"
