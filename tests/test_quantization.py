"""``LLM(quantization="gguf")``: supported tensors, rejected settings, and equal bits in any
schedule.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from pagespec import LLM, SamplingParams
from pagespec.compile import captured_model
from pagespec.compile.captured_model import CaptureOptions, capture_model
from pagespec.compile.fx.check_graph import Bindings, verify_graph
from pagespec.compile.load.load import load_model
from pagespec.compile.probe.probe import probe_model
from pagespec.errors import InvalidInputError
from pagespec.kernels.matmul.cpu import quantized as cpu_quantized
from pagespec.kernels.native import calls
from pagespec.kernels.native.library import library
from pagespec.kernels.native.replay import Stretch
from tests.support.captures import graph_cache
from tests.support.gguf_files import gguf_model
from tests.support.models import save_word_model


@pytest.fixture(params=["native", "torch"])
def kernels(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """The kernels of the machine's compiler, or the operations that replace them."""
    if request.param == "native" and library() is None:
        pytest.skip("the native kernels cannot be built")
    if request.param == "torch":
        monkeypatch.setattr(captured_model, "library", lambda: None)
    return str(request.param)


needs_kernels = pytest.mark.skipif(
    cpu_quantized.reason_against() is not None, reason=str(cpu_quantized.reason_against())
)
PROMPTS = [[3, 1, 4, 1, 5], [9, 2, 6], list(range(5, 60)), [5, 8]]


@needs_kernels
def test_merged_and_given_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kernels: str
) -> None:
    loaded = load_model(gguf_model(tmp_path, monkeypatch), quantization="gguf")
    captured = capture_model(
        loaded, probe_model(loaded), CaptureOptions(is_native=True), graph_cache=graph_cache()
    )
    assert captured.graph is not None
    nodes = list(captured.graph.graph.nodes)
    nodes += [node for n in nodes if isinstance(n.target, Stretch) for node in n.target.graph.nodes]
    targets = [node.target for node in nodes if node.op == "call_function"]
    # Queries, keys and values are one matmul, gate and up another; the head is wider.
    if kernels == "native":
        assert targets.count(calls.linear) == 2 * 4 + 1
        assert targets.count(calls.attention) == targets.count(calls.norm_rope_store) == 2
        assert targets.count(calls.add_rms_norm) == 4
    else:
        assert targets.count(cpu_quantized.linear_int4) == 2 * 4
        assert targets.count(cpu_quantized.linear_float16) == 1
    assert captured.rewrites["merge_linear"] == 2 * 3
    assert captured.float32_matrices == ["model.embed_tokens.weight"]
    sizes = {name: p.numel() for name, p in loaded.module.named_parameters()}
    assert sum(captured.weight_formats.values()) == sum(sizes.values())
    head = "int8" if kernels == "native" else "float16"
    assert captured.weight_formats[head] == sizes["lm_head.weight"]
    for name, parameter in loaded.module.named_parameters():
        is_gone = "proj" in name or "head" in name
        assert parameter.isnan().all().item() == is_gone, name
        assert parameter.untyped_storage().nbytes() == (4 if is_gone else parameter.nbytes)
    placeholders = captured.graph.graph.find_nodes(op="placeholder")
    places = dict(zip((n.name for n in placeholders), captured.sources, strict=True))
    constants = {name: s[1] for name, s in places.items() if s[0] == "constant"}
    others = {name: s[1] for name, s in places.items() if s[0] != "constant"}
    verify_graph(captured.graph, "cpu", Bindings(constants, others))


@needs_kernels
@pytest.mark.parametrize("transparent", [True, False])
def test_logits_and_stats(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    transparent: bool,
    kernels: str,
) -> None:
    path = gguf_model(tmp_path, monkeypatch, "Q4_0")
    logits: dict[str | None, list[torch.Tensor]] = {}
    caplog.set_level(logging.INFO, "pagespec")
    for quantization in (None, "gguf"):
        kept: list[torch.Tensor] = []
        llm = LLM(
            path,
            device="cpu",
            num_blocks=32,
            quantization=quantization,
            transparent=transparent,
            on_logits=lambda _, row, kept=kept: kept.append(row.clone()),
        )
        llm.generate(PROMPTS[:1], SamplingParams(temperature=0, max_tokens=1))
        logits[quantization] = kept
        assert bool(llm.stats().weight_formats) == (quantization is not None)
    assert "M in int4" in caplog.text
    assert "model.embed_tokens.weight" in caplog.text
    exact, near = logits[None][0], logits["gguf"][0]
    assert not torch.equal(exact, near)
    assert (near - exact).norm() / exact.norm() < 0.03


@needs_kernels
@pytest.mark.parametrize("format", ["Q4_1", "Q8_0"])
def test_bits_do_not_depend_on_the_schedule(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kernels: str, format: str
) -> None:
    """Alone, together with others, chunked, and scored."""
    path = gguf_model(tmp_path, monkeypatch, format)
    sampling = SamplingParams(temperature=0.8, seed=3, max_tokens=8, logprobs=2)
    settings: dict[str, Any] = {"device": "cpu", "quantization": "gguf", "num_blocks": 64}
    alone, together = (
        LLM(path, **settings),
        LLM(path, max_num_batched_tokens=16, max_num_seqs=3, **settings),
    )
    expected = [alone.generate([prompt], sampling)[0].outputs[0] for prompt in PROMPTS]
    for answer, reference in zip(together.generate(PROMPTS, sampling), expected, strict=True):
        assert answer.outputs[0].token_ids == reference.token_ids
        assert answer.outputs[0].logprobs == reference.logprobs
    for prompt, reference in zip(PROMPTS, expected, strict=True):
        text = [*prompt, *reference.token_ids]
        [scored] = together.generate([text], SamplingParams(max_tokens=1, prompt_logprobs=0))
        assert scored.prompt_logprobs is not None
        assert reference.logprobs is not None
        for place, (token, entry) in enumerate(
            zip(reference.token_ids, reference.logprobs, strict=True), len(prompt)
        ):
            found = scored.prompt_logprobs[place]
            assert found is not None
            assert found[token].logprob == entry[token].logprob


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"quantization": "awq"}, "must be one of gguf"),
        ({"quantization": 4}, "must be one of gguf"),
        ({"tensor_parallel_size": 2}, "is for one process"),
        ({"dtype": "bfloat16"}, "needs dtype float32"),
        ({"compile": "eager"}, "needs a captured graph"),
        ({"load_format": "dummy"}, "needs weights to read"),
        ({"device": "cpu"}, "needs a .gguf file"),
    ],
)
def test_refused(tmp_path: Path, settings: dict[str, Any], reason: str) -> None:
    folder = save_word_model(tmp_path)
    with pytest.raises(InvalidInputError, match=reason) as caught:
        LLM(folder, **{"quantization": "gguf", **settings})
    assert caught.value.field == "quantization"


def test_a_gpu_on_which_it_was_not_tried(
    cuda_capability: Callable[[tuple[int, int]], None],
) -> None:
    cuda_capability((8, 6))
    with pytest.raises(InvalidInputError, match="served on GPUs of sm90; this one is sm86"):
        load_model("model.gguf", quantization="gguf", device="cuda")


def test_a_machine_without_the_instructions(cpu_capability: Callable[[str], None]) -> None:
    cpu_capability("DEFAULT")
    with pytest.raises(InvalidInputError, match="AVX2 or AVX512; torch found DEFAULT"):
        load_model("model.gguf", quantization="gguf")
