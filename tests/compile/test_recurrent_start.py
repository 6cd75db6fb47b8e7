"""Start-up of recurrent models: restored from a start record, and from the graph cache."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from pagespec import LLM, InvalidInputError, SamplingParams
from pagespec.build import _check_recurrent
from pagespec.compile.captured_model import CapturedModel
from pagespec.compile.kv_cache import allocate_kv_caches, allocate_states, check_interval
from pagespec.compile.load.load import load_model
from pagespec.compile.model.loaded import WHOLE, Shard
from pagespec.compile.probe.probe import probe_model
from pagespec.compile.step_inputs import StepInputs
from tests.compile.test_start_record import capture_restored, record_of, start
from tests.support.models import tiny_model


def _logits(captured: CapturedModel) -> list[Tensor]:
    """The logits of two steps of one request; the second step continues in another slot."""
    loaded = captured.loaded
    kv_caches = allocate_kv_caches(captured.specs, 4, 8, loaded.dtype, "cpu")
    states = allocate_states(loaded.recurrent, 4, 4, "cpu")
    forward = captured.bind(kv_caches, states)
    found = []
    for begin, end in ((0, 6), (6, 9)):
        positions = torch.arange(begin, end)
        step = StepInputs(
            input_ids=(positions * 7 % 100).unsqueeze(0),
            position_ids=positions.unsqueeze(0),
            logits_to_keep=torch.arange(end - begin),
            slot_mapping=positions,
            query_starts=torch.tensor([0, end - begin, end - begin], dtype=torch.int32),
            context_lens=torch.tensor([end, 0], dtype=torch.int32),
            block_tables=torch.tensor([[0, 1], [4, 4]], dtype=torch.int32),
            table_rows=torch.tensor([0, 1], dtype=torch.int32),
            state_tables=torch.tensor([[2, 0, 1], [4, 4, 4]], dtype=torch.int32),
        )
        with torch.inference_mode():
            found.append(forward(step).logits)
    return found


def test_a_restored_model_has_its_recurrent_calls(tmp_path: Path) -> None:
    folder, cache = tmp_path / "model", tmp_path / "cache"
    tiny_model("falcon_h1").save_pretrained(folder)
    first = start(folder, cache)
    restored = record_of(folder, cache).restore()
    assert restored is not None
    assert restored.loaded.recurrent == first.loaded.recurrent != []
    second = capture_restored(restored)
    for one, other in zip(_logits(first), _logits(second), strict=True):
        assert torch.equal(one, other)


def test_what_a_model_without_a_longest_context_is_asked_for_is_not_kept(tmp_path: Path) -> None:
    folder, cache = tmp_path / "model", tmp_path / "cache"
    tiny_model("mamba2", num_hidden_layers=1).save_pretrained(folder)
    loaded = load_model(folder, max_model_len=40)
    record = record_of(folder, cache)
    record.write(record.describe(loaded, probe_model(loaded)), "key")
    assert record.restore() is None


def test_settings_of_states() -> None:
    model = tiny_model("mamba2", num_hidden_layers=1)
    with pytest.raises(InvalidInputError, match="names none"):
        LLM(model)
    llm = LLM(model, max_model_len=50, max_num_seqs=3, block_size=8)
    # Without attention blocks take no memory: all requests have theirs.
    assert llm.num_blocks == 3 * 7
    states = llm.engine.scheduler.blocks.states
    assert states is not None
    assert (states.num_slots, states.interval) == (7, 256)
    llm = LLM(model, max_model_len=50, max_num_seqs=3, num_state_slots=5, state_interval=48)
    states = llm.engine.scheduler.blocks.states
    assert states is not None
    assert (states.num_slots, states.interval) == (5, 48)
    params = SamplingParams(temperature=0.0, max_tokens=4, n=1)
    (output,) = llm.generate([[1, 2, 3]], params, use_tqdm=False)
    assert len(output.outputs[0].token_ids) == 4
    with pytest.raises(InvalidInputError) as refused:
        LLM(model, max_model_len=50, num_state_slots=1 << 30)
    assert refused.value.field == "num_state_slots"


def test_ranks_are_refused() -> None:
    loaded = load_model(tiny_model("lfm2"))
    probe_model(loaded)
    _check_recurrent(loaded, WHOLE)
    with pytest.raises(InvalidInputError) as refused:
        _check_recurrent(loaded, Shard(0, 2))
    assert refused.value.field == "tensor_parallel_size"
    _check_recurrent(load_model(tiny_model("llama")), Shard(0, 2))


def test_intervals_shorter_than_a_convolution_are_refused_on_a_gpu() -> None:
    loaded = load_model(tiny_model("mamba2", num_hidden_layers=1), max_model_len=64)
    probe_model(loaded)
    check_interval(loaded.recurrent, 3)
    with pytest.raises(InvalidInputError, match="must be 3 or more") as refused:
        check_interval(loaded.recurrent, 2)
    assert refused.value.field == "state_interval"
    check_interval([], 0)
