"""Log-probabilities on a GPU: kernels with a real vocabulary, and whole engines.

The engine must not compile, capture or wait because of them. Its scores must be the floats that
were sampled.
"""

from __future__ import annotations

import copy
import random
from typing import Any

import pytest
import torch

from pagespec import LLM, SamplingParams
from pagespec.kernels.sampling.logprob_rows import ROW_WORDS
from pagespec.runner.logprob_rows import HostLogprobRows
from tests.support.models import VOCAB_SIZE, tiny_model

pytestmark = pytest.mark.gpu

VOCAB = 151_936


def forbid_synchronisation(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps that wait for the GPU while they are queued raise."""
    runner, dispatch = llm.engine.runner, llm.engine.runner.dispatch

    def watched(plan: Any) -> Any:
        torch.cuda.set_sync_debug_mode("error")
        try:
            return dispatch(plan)
        finally:
            torch.cuda.set_sync_debug_mode("default")

    monkeypatch.setattr(runner, "dispatch", watched)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_kernels_at_a_real_vocabulary(dtype: torch.dtype) -> None:
    from pagespec.kernels.sampling.logprobs import write_logprobs

    generator = torch.Generator("cuda").manual_seed(1)
    logits = (torch.randn(256, VOCAB, generator=generator, device="cuda") * 3).to(dtype)
    tokens = torch.randint(VOCAB, (256,), generator=generator, device="cuda")
    fields = torch.stack([torch.arange(256, device="cuda"), tokens, tokens * 0 + 20]).int()
    rows = torch.zeros(256, ROW_WORDS, dtype=torch.int32, device="cuda")
    write_logprobs(logits, fields, tokens, rows)
    exact = logits.double().log_softmax(-1).cpu()
    found = HostLogprobRows(rows.cpu().numpy())
    for i, token in enumerate(tokens.tolist()):
        logprob, rank, top_ids, top = found.row(i, 20)
        row = logits[i].float().cpu()
        assert abs(logprob - float(exact[i, token])) < 5e-6
        before = (row > row[token]).sum() + (row[:token] == row[token]).sum()
        assert rank == 1 + int(before)
        order = row.sort(descending=True, stable=True).indices[:20]
        assert top_ids == order.tolist()
        assert torch.allclose(torch.tensor(top).double(), exact[i, order], atol=5e-6)
    for begin, end in ((0, 1), (3, 67), (255, 256)):
        own = fields[:, begin:end].clone()
        part = torch.zeros(end - begin, ROW_WORDS, dtype=torch.int32, device="cuda")
        write_logprobs(logits, own, tokens, part)
        assert torch.equal(part, rows[begin:end])
        own[0] -= begin
        write_logprobs(logits[begin:end].clone(), own, tokens, part)
        assert torch.equal(part, rows[begin:end])


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"compile": "graph"},
        {"graph_batch_sizes": []},
        {"overlap": False},
        {"logprobs_mode": "processed_logprobs"},
    ],
)
@pytest.mark.parametrize("arch", ["qwen3", "gemma2", "gpt2"])
def test_an_engine(arch: str, settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    import triton

    model = tiny_model(arch) if arch == "gpt2" else tiny_model(arch, head_dim=64, hidden_size=256)
    llm = LLM(
        copy.deepcopy(model).to("cuda"),
        dtype="bfloat16",
        device="cuda",
        max_num_seqs=12,
        max_num_batched_tokens=64,
        max_model_len=256,
        num_blocks=60,
        **settings,
    )
    late: list[str] = []
    before = triton.knobs.compilation.listener

    def listen(**event: Any) -> None:
        late.append(str(event["metadata"].get("name")))
        if before is not None:
            before(**event)

    monkeypatch.setattr(triton.knobs.compilation, "listener", listen)
    forbid_synchronisation(llm, monkeypatch)
    rng = random.Random(3)
    prompts = [[rng.randrange(2, VOCAB_SIZE) for _ in range(3 + 9 * i)] for i in range(12)]
    kinds: list[dict[str, Any]] = [
        {"temperature": 0.0, "logprobs": 3},
        {"temperature": 0.8, "logprobs": 20, "prompt_logprobs": 2},
        {"temperature": 1.0, "top_p": 0.9},
    ]
    if "logprobs_mode" not in settings:
        kinds[2]["logprob_token_ids"] = [7, 2, 30]
    params = [
        SamplingParams(max_tokens=30, ignore_eos=True, seed=i, **kinds[i % 3]) for i in range(12)
    ]
    outputs = llm.generate(prompts, params, use_tqdm=False)
    assert sum(output.metrics.num_preemptions for output in outputs)
    whole = [p + o.outputs[0].token_ids for p, o in zip(prompts, outputs, strict=True)]
    scores = llm.score(whole, use_tqdm=False)
    is_raw = "logprobs_mode" not in settings and arch != "gpt2"  # its addmm is no kernel of ours
    for prompt, output, score in zip(prompts, outputs, scores, strict=True):
        answer = output.outputs[0]
        if answer.logprobs is not None and is_raw:
            own = zip(answer.token_ids, answer.logprobs, strict=True)
            found = [entries[token].logprob for token, entries in own]
            assert score.logprobs[len(prompt) :] == found
            given = output.outputs[0].logprobs if len(prompt) % 27 == 21 else None
            assert all({7, 2, 30} <= entries.keys() for entries in given or ())
        for position, entries in enumerate((output.prompt_logprobs or [])[1:], 1):
            assert entries is not None
            if is_raw:
                assert entries[prompt[position]].logprob == score.logprobs[position]
    with torch.inference_mode():
        judge = model.to("cuda", torch.float32)
        judge.set_attn_implementation("eager")
        ids = torch.tensor([whole[5]], device="cuda")
        expected = judge(ids).logits[0].float().log_softmax(-1).cpu()
    errors = [
        abs(value - float(expected[position, token]))
        for position, (token, value) in enumerate(
            zip(whole[5][1:], scores[5].logprobs[1:], strict=True)
        )
        if value is not None
    ]
    assert sorted(errors)[len(errors) // 2] < 0.3  # bfloat16, beside float32
    if llm.stats().num_graphs:  # without any, kernels are compiled when a step needs them
        assert late == []


def test_more_than_the_kernel_returns(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a synchronisation, and with the floats of the kernel."""
    llm = LLM(
        copy.deepcopy(tiny_model("qwen3", head_dim=64, hidden_size=256)).to("cuda"),
        dtype="bfloat16",
        device="cuda",
        max_model_len=256,
        num_blocks=60,
        max_logprobs=-1,
    )
    forbid_synchronisation(llm, monkeypatch)
    prompts = [list(range(2, 12)), list(range(3, 40))]

    def outputs(num_top: int) -> list[Any]:
        params = SamplingParams(
            max_tokens=8, seed=1, ignore_eos=True, logprobs=num_top, prompt_logprobs=num_top
        )
        return [
            [*output.prompt_logprobs[1:], *output.outputs[0].logprobs]  # type: ignore[index, misc]
            for output in llm.generate(prompts, params, use_tqdm=False)
        ]

    for whole, some in zip(outputs(-1), outputs(20), strict=True):
        for entries, few in zip(whole, some, strict=True):
            assert sorted(entries) == list(range(VOCAB_SIZE))
            assert few.items() <= entries.items()
            ordered = sorted(entries.values(), key=lambda entry: entry.rank)
            assert [entry.rank for entry in ordered] == list(range(1, VOCAB_SIZE + 1))
            values = [entry.logprob for entry in ordered]
            assert values == sorted(values, reverse=True)
