"""Two ranks as processes of their own on a CPU, serving, interrupted and lost."""

from __future__ import annotations

import gc
import json
import os
import random
import resource
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import pagespec.distributed
from pagespec import LLM, EngineError, InvalidInputError, SamplingParams
from pagespec.distributed import workers as workers_module
from pagespec.engine.plan import StepPlan
from pagespec.kernels.sampling.sampler import SamplingInputs, sample
from spec import replay
from tests.golden.harness import (
    Condition,
    GoldenRow,
    Reference,
    Watcher,
    check,
    compare,
    mixed_prompts,
    reference_of,
)
from tests.support import interrupts
from tests.support.interrupts import LineRaiser
from tests.support.models import VOCAB_SIZE, tiny_model

LENGTHS, NUM_OUTPUTS = [1, 2, 17, 40, 64, 90, 33, 48], [16, 24, 12, 16, 24, 16, 8, 12]
HOSTILE: dict[str, Any] = {
    "block_size": 4,
    "num_blocks": 34,
    "max_model_len": 128,
    "max_num_batched_tokens": 16,
    "max_num_seqs": 8,
    "overlap": True,
    "check_invariants": True,
}
GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
_BOUND_S = 30.0


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    tiny_model("qwen3").save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def reference() -> Reference:
    judge = tiny_model("qwen3")
    judge.set_attn_implementation("eager")
    return reference_of(judge, mixed_prompts(LENGTHS, VOCAB_SIZE), NUM_OUTPUTS)


class Group:
    """An engine of two ranks for all tests; what ends it is followed by another."""

    def __init__(self, folder: Path, traces: Path) -> None:
        self._folder, self._traces = folder, traces
        self._llm: LLM | None = None
        self.pids: list[int] = []
        self.watcher = Watcher(GoldenRow("qwen3", "2 ranks", len(LENGTHS)))
        self.before_logits: Callable[[StepPlan], None] = lambda _: None

    @property
    def trace(self) -> Path:
        return self._traces / f"{id(self._llm)}.jsonl"

    @property
    def llm(self) -> LLM:
        if self._llm is None:
            trace = self._traces / "new.jsonl"
            self._llm = LLM(
                self._folder,
                device="cpu",
                tensor_parallel_size=2,
                trace=trace,
                on_logits=self._on_logits,
                **HOSTILE,
            )
            trace.rename(self.trace)
            self.pids = self._llm._runner._workers.pids
        return self._llm

    def _on_logits(self, plan: StepPlan, logits: torch.Tensor) -> None:
        assert logits.shape[-1] == VOCAB_SIZE
        self.before_logits(plan)
        self.watcher(plan, logits)

    def watch(self) -> Watcher:
        """From here on."""
        self.watcher = Watcher(GoldenRow("qwen3", "2 ranks", len(LENGTHS)))
        return self.watcher

    def tokens(self, prompts: list[list[int]], params: Any = GREEDY) -> list[list[int]]:
        results = self.llm.generate(prompts, params, use_tqdm=False)
        return [list(result.outputs[0].token_ids) for result in results]

    def drop(self) -> None:
        """As a user does who deletes it."""
        self._llm = None
        gc.collect()


@pytest.fixture(scope="module")
def group(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Group]:
    group = Group(folder, tmp_path_factory.mktemp("traces"))
    yield group
    group.drop()
    assert_gone(group.pids)


def assert_gone(pids: list[int]) -> None:
    """Within the time in which a killed process goes."""
    end = time.monotonic() + _BOUND_S
    for pid in pids:
        while is_there(pid):
            assert time.monotonic() < end, f"process {pid} is left"
            time.sleep(0.02)


def is_there(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    return state != "Z"  # one whose parent has not asked: it is at its end


def check_trace(group: Group) -> replay.Verdict:
    verdict = replay.check(group.trace.read_text().splitlines())
    assert not verdict.property_id, verdict
    return verdict


# Serving ----------------------------------------------------------------------------------------


def test_a_hostile_run_equals_generate(group: Group, reference: Reference) -> None:
    llm = group.llm
    # Some are under way and are given up, in the middle.
    long = SamplingParams(temperature=0.0, max_tokens=60, ignore_eos=True)
    items = [(prompt, long if i else GREEDY) for i, prompt in enumerate(reference.prompts[:4])]
    given_up = llm.generate_iter(items)
    next(given_up)
    given_up.close()
    watcher = group.watch()
    compare(llm, 2, reference, watcher)
    verdict = watcher.row.trace = check_trace(group)
    watcher.row.num_steps = verdict.num_steps
    check(watcher.row, Condition("", {}, must_preempt=True, must_hit=True, must_chunk=True))
    assert llm.stats().num_steps >= verdict.num_steps
    assert llm.stats().startup_s["load"] > 0


def test_tokens_and_logits_are_the_same_in_any_company(group: Group, reference: Reference) -> None:
    prompts = [prompt for prompt in reference.prompts if len(prompt) < 50]
    first = group.watch()
    together = group.llm.generate(prompts, GREEDY, use_tqdm=False)
    second = group.watch()
    order = list(range(len(prompts)))
    random.Random(1).shuffle(order)
    shuffled = group.llm.generate([prompts[i] for i in order], GREEDY, use_tqdm=False)
    pairs = [(together[i], result) for i, result in zip(order, shuffled, strict=True)]
    third = group.watch()
    alone = [group.llm.generate(prompt, GREEDY, use_tqdm=False)[0] for prompt in prompts]
    for watcher, results in (
        (second, pairs),
        (third, list(zip(together, alone, strict=True))),
    ):
        for one, other in results:
            assert one.outputs[0].token_ids == other.outputs[0].token_ids
            for i in range(len(one.outputs[0].token_ids)):
                expected = first.logits[one.request_id, i]
                assert torch.equal(watcher.logits[other.request_id, i], expected)


def test_sampled_tokens_are_those_of_one_rank(group: Group, reference: Reference) -> None:
    params = [
        SamplingParams(
            temperature=(0.7, 1.0, 2.5)[i % 3],
            top_k=(0, 5, 40)[i % 3],
            top_p=(1.0, 0.8)[i % 2],
            min_p=(0.0, 0.0, 0.05)[i % 3],
            seed=7 * i - 3,
            max_tokens=10,
            ignore_eos=True,
        )
        for i in range(len(reference.prompts))
    ]
    watcher = group.watch()
    results = group.llm.generate(reference.prompts, params, use_tqdm=False)
    num_greedy = 0
    for prompt, one, result in zip(reference.prompts, params, results, strict=True):
        for i, token in enumerate(result.outputs[0].token_ids):
            logits = watcher.logits[result.request_id, i]
            inputs = SamplingInputs.from_lists(
                temperature=[one.temperature],
                top_k=[one.top_k],
                top_p=[one.top_p],
                min_p=[one.min_p],
                seeds=[one.seed],
                positions=[len(prompt) + i],
                device=torch.device("cpu"),
            )
            assert int(sample(logits[None], inputs)) == token
            num_greedy += int(logits.argmax()) == token
    assert num_greedy < 60  # of 80
    again = group.tokens(reference.prompts[::-1], params[::-1])[::-1]
    assert again == [list(result.outputs[0].token_ids) for result in results]


def test_a_bad_prompt_disturbs_nothing(group: Group, reference: Reference) -> None:
    prompts = reference.prompts[2:6]
    expected = group.tokens(prompts)
    with pytest.raises(InvalidInputError, match=r"prompts\[1\]"):
        group.llm.generate([prompts[0], [VOCAB_SIZE], prompts[1]], GREEDY, use_tqdm=False)
    bad: list[Any] = [prompts[0], [-1], prompts[1], [2] * 128, prompts[2], prompts[3], []]
    found = list(group.llm.generate_iter([(prompt, GREEDY) for prompt in bad]))
    for i in (1, 3, 6):
        assert isinstance(found[i], InvalidInputError)
    good: list[Any] = [found[i] for i in (0, 2, 4, 5)]
    assert [list(result.outputs[0].token_ids) for result in good] == expected


# Interrupts -------------------------------------------------------------------------------------


def test_ctrl_c_at_any_step_leaves_an_engine_that_answers(
    group: Group, reference: Reference
) -> None:
    prompts = reference.prompts[:4]
    expected = group.tokens(prompts)
    for at in (0, 1, 2, 5, 9):
        num_steps = 0

        def interrupt(_plan: StepPlan, at: int = at) -> None:
            nonlocal num_steps
            num_steps += 1
            if num_steps == at + 1:  # in the middle of the ranks' step
                os.kill(os.getpid(), signal.SIGINT)

        group.before_logits = interrupt
        with pytest.raises(KeyboardInterrupt):
            group.tokens(prompts)
        group.before_logits = lambda _: None
        assert group.tokens(prompts) == expected, at
    check_trace(group)
    assert all(map(is_there, group.pids))


def test_an_interrupt_at_any_line_leaves_an_engine_that_answers(
    group: Group, reference: Reference, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = str(Path(pagespec.distributed.__file__).parent)
    monkeypatch.setattr(interrupts, "_OURS", (folder,))
    prompts = reference.prompts[:3]
    params = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)
    expected = group.tokens(prompts, params)
    places: set[str] = set()
    for first in range(1, 90):
        # A second one comes while the first is dealt with.
        with LineRaiser([first, 1 + first % 13][: 1 + first % 2], KeyboardInterrupt) as raiser:
            try:
                group.llm.generate(prompts, params, use_tqdm=False)
            except KeyboardInterrupt:
                places.update(raiser.raised_at)
        assert group.tokens(prompts, params) == expected, raiser.raised_at
    assert len(places) > 20
    check_trace(group)


def test_another_engine_is_refused_while_this_one_lives(group: Group, folder: Path) -> None:
    expected = group.tokens([[2, 3, 4]])
    with pytest.raises(InvalidInputError, match=r"tensor_parallel_size.*in use in this process"):
        LLM(folder, device="cpu", tensor_parallel_size=2, **HOSTILE)
    assert group.tokens([[2, 3, 4]]) == expected


# Faults -----------------------------------------------------------------------------------------


def lose(group: Group, what: str, fault: Callable[[], None], at: int = 5) -> str:
    """Have a fault come while a step is computed: it is told in time, and again at each call, and
    nothing is left of the group."""
    llm, num_steps = group.llm, 0

    def on_step(_plan: StepPlan) -> None:
        nonlocal num_steps
        num_steps += 1
        if num_steps == at:
            fault()

    group.before_logits = on_step
    begin = time.monotonic()
    with pytest.raises(EngineError, match=what) as caught:
        group.tokens([[2, 3, 4, 5]] * 4, SamplingParams(max_tokens=60, ignore_eos=True))
    assert num_steps >= at
    with pytest.raises(EngineError, match="make a new engine"):
        group.tokens([[2, 3, 4]])
    group.before_logits = lambda _: None
    assert time.monotonic() - begin < _BOUND_S
    assert_gone(group.pids)
    check_trace(group)
    del llm
    group.drop()
    return str(caught.value)


def test_a_killed_rank_is_named_and_a_new_engine_works(group: Group, reference: Reference) -> None:
    expected = group.tokens(reference.prompts[:3])
    (pid,) = group.pids
    lose(group, "rank 1 .*by signal 9.*make a new engine", lambda: os.kill(pid, signal.SIGKILL))
    assert group.tokens(reference.prompts[:3]) == expected
    assert group.pids != [pid]


def test_a_rank_that_hangs_is_named(group: Group, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workers_module, "_STALL_S", 2.0)
    assert group.llm
    (pid,) = group.pids
    lose(group, "rank 1 has made no progress for 2 s", lambda: os.kill(pid, signal.SIGSTOP))


@pytest.mark.nightly
def test_a_rank_out_of_memory_says_so(group: Group) -> None:
    assert group.llm
    (pid,) = group.pids

    def leave_no_memory() -> None:
        resource.prlimit(pid, resource.RLIMIT_AS, (1, resource.RLIM_INFINITY))

    text = lose(group, "rank 1 has failed", leave_no_memory, at=2)
    assert any(word in text.lower() for word in ("memory", "alloc", "mmap")), text


@pytest.mark.nightly
def test_an_engine_that_is_collected_ends_its_workers(group: Group, folder: Path) -> None:
    group.tokens([[2, 3]])
    pids = group.pids
    group.drop()
    assert_gone(pids)
    # Nothing is left of the group that would keep another from its place.
    assert group.tokens([[2, 3]])
    assert group.pids != pids


_PROGRAM = """
import json, sys
from pagespec import LLM, SamplingParams
if __name__ == "__main__":
    folder, then = sys.argv[1:]
    llm = LLM(folder, device="cpu", tensor_parallel_size=2, num_blocks=64, max_model_len=256)
    pids = llm._runner._workers.pids
    params = SamplingParams(temperature=0.0, max_tokens=200, ignore_eos=True)
    print(json.dumps(pids), flush=True)
    while True:
        tokens = llm.generate([[2, 3, 4]], params, use_tqdm=False)[0].outputs[0].token_ids
        if then == "end":
            break
    print(json.dumps(tokens), flush=True)
"""


def start_program(folder: Path, then: str) -> subprocess.Popen[str]:
    path = os.pathsep.join(entry or os.getcwd() for entry in sys.path)
    return subprocess.Popen(
        [sys.executable, "-c", _PROGRAM, str(folder), then],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": path, "TQDM_DISABLE": "1"},
    )


def pids_of(program: subprocess.Popen[str]) -> list[int]:
    assert program.stdout is not None
    found: list[int] = json.loads(program.stdout.readline())
    assert found
    return found


def test_workers_end_with_their_parent_however_it_ends(folder: Path) -> None:
    program = start_program(folder, "on")
    pids = pids_of(program)
    time.sleep(0.5)
    assert all(map(is_there, pids))
    program.kill()
    program.communicate()
    assert_gone(pids)


@pytest.mark.nightly
def test_a_program_ends_without_a_word(folder: Path) -> None:
    program = start_program(folder, "end")
    pids = pids_of(program)
    out, err = program.communicate(timeout=_BOUND_S)
    assert (program.returncode, len(json.loads(out))) == (0, 200)
    assert err == ""
    assert_gone(pids)


@pytest.mark.nightly
@pytest.mark.parametrize("after_s", [0.2, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0])
def test_ctrl_c_during_the_start_leaves_no_process(folder: Path, after_s: float) -> None:
    """Of any moment: imports, the meeting of the ranks, weights, probe and trace."""
    program = start_program(folder, "on")
    end = time.monotonic() + _BOUND_S
    while not (pids := children_of(program.pid)):
        assert time.monotonic() < end
        time.sleep(0.01)
    time.sleep(after_s)
    program.send_signal(signal.SIGINT)
    _, err = program.communicate(timeout=_BOUND_S)
    assert program.returncode != 0
    assert err.count("Traceback") == 1, err
    assert "KeyboardInterrupt" in err
    assert_gone(pids)


@pytest.mark.nightly
@pytest.mark.parametrize("after_s", [0.5, 3.0, 4.0, 5.0, 6.0])
def test_a_rank_that_is_killed_during_the_start_is_named(
    group: Group, folder: Path, after_s: float
) -> None:
    group.drop()
    before, killed = set(children_of(os.getpid())), 0.0

    def kill() -> None:
        nonlocal killed
        while not (new := set(children_of(os.getpid())) - before):
            time.sleep(0.01)
        time.sleep(after_s)
        killed = time.monotonic()
        os.kill(min(new), signal.SIGKILL)

    thread = threading.Thread(target=kill)
    thread.start()
    with pytest.raises(EngineError, match=r"rank 1 .*by signal 9"):
        LLM(folder, device="cpu", tensor_parallel_size=2, **HOSTILE)
    thread.join()
    assert time.monotonic() - killed < _BOUND_S
    assert set(children_of(os.getpid())) <= before


def children_of(pid: int) -> list[int]:
    text = Path(f"/proc/{pid}/task/{pid}/children").read_text()
    return list(map(int, text.split()))


@pytest.mark.nightly
def test_weights_that_one_rank_cannot_read_are_the_error_of_load(
    group: Group, tmp_path: Path
) -> None:
    group.drop()
    tiny_model("qwen3").save_pretrained(tmp_path)
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1000])
    before = set(children_of(os.getpid()))
    begin = time.monotonic()
    with pytest.raises(InvalidInputError, match="must have weights"):
        LLM(tmp_path, device="cpu", tensor_parallel_size=2, **HOSTILE)
    assert time.monotonic() - begin < _BOUND_S
    assert set(children_of(os.getpid())) <= before
    assert group.tokens([[2, 3]])
