"""Arguments of vLLM and nano-vllm: accepted, ignored, or rejected with the replacement."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from pagespec import LLM, AsyncLLM, InvalidInputError
from pagespec.engine.config import EngineConfig
from pagespec.params.foreign import CALL, ENGINE, SERVER, SPECULATION, translate


class Built(Exception):
    """What the engine was to be built from."""


def config_of(monkeypatch: pytest.MonkeyPatch, cls: Any = LLM, **given: Any) -> EngineConfig:
    """The settings that a call has its engine built with."""

    def build(_model: object, config: EngineConfig, _on_logits: object) -> None:
        raise Built(config)

    monkeypatch.setattr("pagespec.llm.import_engine", lambda *_: build)
    with pytest.raises(Built) as caught:
        cls("m", **given)
    config: EngineConfig = caught.value.args[0]
    return config


@pytest.mark.parametrize("cls", [LLM, AsyncLLM])
@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"gpu_memory_utilization": 0.5}, {"memory_utilization": 0.5}),
        ({"num_gpu_blocks_override": 9}, {"num_blocks": 9}),
        ({"num_kvcache_blocks": 9}, {"num_blocks": 9}),
        ({"num_kvcache_blocks": -1}, {"num_blocks": None}),
        ({"kvcache_block_size": 256}, {"block_size": 256}),
        ({"scheduling_policy": "priority"}, {"policy": "priority"}),
        ({"async_scheduling": False}, {"overlap": False}),
        ({"cudagraph_capture_sizes": [1, 2]}, {"graph_batch_sizes": (1, 2)}),
        ({"enforce_eager": True}, {"compile": "graph", "graph_batch_sizes": ()}),
        ({"enforce_eager": False}, {"compile": "auto", "graph_batch_sizes": None}),
        ({"tool_call_parser": "hermes"}, {"tool_call_format": "hermes"}),
        ({"reasoning_parser": "deepseek_r1"}, {"reasoning_format": "deepseek_r1"}),
        ({"reasoning_parser": "qwen3"}, {"reasoning_format": "think"}),
        ({"tool_call_parser": "openai"}, {"tool_call_format": "harmony"}),
        ({"dtype": "half"}, {"dtype": "float16"}),
        ({"dtype": "float"}, {"dtype": "float32"}),
        ({"load_format": "safetensors"}, {"load_format": "auto"}),
        ({"kv_cache_dtype": "fp8_e4m3"}, {"kv_cache_dtype": "fp8"}),
        ({"num_gpu_blocks_override": 9, "num_blocks": 9}, {"num_blocks": 9}),
        ({"num_gpu_blocks_override": 9, "num_blocks": None}, {"num_blocks": 9}),
        ({"enforce_eager": True, "compile": "auto"}, {"compile": "graph"}),
        ({"attention_backend": "TRITON_ATTN"}, {"attention": "triton"}),
        ({"dtype": torch.bfloat16}, {"dtype": "bfloat16"}),
        ({"generation_config": "pagespec"}, {"generation_config": "vllm"}),
    ],
)
def test_arguments_of_equal_meaning_are_accepted(
    monkeypatch: pytest.MonkeyPatch, cls: type, given: Any, expected: dict[str, Any]
) -> None:
    config = config_of(monkeypatch, cls, **given)
    assert {name: getattr(config, name) for name in expected} == expected


HARMLESS = {
    "trust_remote_code": [False, True, None],
    "tokenizer": [None, "m"],
    "tokenizer_mode": ["auto", "hf"],
    "revision": [None],
    "download_dir": [None],
    "data_parallel_size": [1],
    "pipeline_parallel_size": [1],
    "swap_space": [0, 0.0, 4],
    "enable_chunked_prefill": [True, None],
    "disable_log_stats": [True, False],
    "compilation_config": [{}],
    "master_port": [29501],
    "nnodes": [1],
    "max_num_seqs": [None],
    "enable_prefix_caching": [None],
    "seed": [None],
    "speculative_config": [None, {}],
    "enable_lora": [False],
    "max_lora_rank": [16],
    "limit_mm_per_prompt": [None, {}, {"image": 0}, {"image": 5, "video": {"count": 1}}],
    "hf_overrides": [None, {}],
    "served_model_name": [None, "m"],
    "model_impl": ["auto", "transformers"],
    "runner": ["auto", "generate"],
    "distributed_executor_backend": ["mp", None],
    "enable_sleep_mode": [False],
    "hf_config": [None],
    "eos": [-1],
}


@pytest.mark.parametrize("name", sorted(HARMLESS))
def test_values_that_equal_the_behaviour_are_accepted(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    for value in HARMLESS[name]:
        assert config_of(monkeypatch, **{name: value}) == EngineConfig()


REFUSED = {
    "trust_remote_code": ("yes", "True or False"),
    "tokenizer": ("other", "folder"),
    "tokenizer_mode": ("slow", "folder"),
    "revision": ("main", "snapshot_download"),
    "download_dir": ("/x", "HF_HUB_CACHE"),
    "data_parallel_size": (2, "--replicas"),
    "pipeline_parallel_size": (2, "tensor_parallel_size"),
    "nnodes": (2, "this host"),
    "prefix_caching_hash_algo": ("sha256", "cache_salt"),
    "pooler_config": ({"pooling_type": "MEAN"}, "embeddings"),
    "optimization_level": (0, "use compile"),
    "cpu_offload_gb": (1.5, "quantization"),
    "enable_chunked_prefill": (False, "max_num_batched_tokens"),
    "disable_log_stats": ("no", "True or False"),
    "num_speculative_tokens": (5, "speculative_config"),
    "speculative_model": ("m", "speculative_config"),
    "enable_lora": (True, "merge"),
    "limit_mm_per_prompt": ({"image": -1}, "0 or more"),
    "enable_prompt_embeds": (True, "not embeddings"),
    "served_model_name": ("x", "--served-model-name"),
    "model_impl": ("vllm", "transformers"),
    "runner": ("pooling", "only text is generated; embeddings, classification"),
    "distributed_executor_backend": ("external_launcher", "tensor_parallel_size"),
    "compilation_config": ({"level": 3}, "graph_batch_sizes"),
    "enforce_eager": ("yes", "True or False"),
    "enable_sleep_mode": (True, "new LLM"),
    "logits_processors": ([print], "must be a subclass of LogitsProcessor"),
}


@pytest.mark.parametrize("name", sorted(REFUSED))
def test_other_values_are_refused_with_an_alternative(name: str) -> None:
    value, text = REFUSED[name]
    with pytest.raises(InvalidInputError) as caught:
        LLM("m", **{name: value})
    assert caught.value.field == name
    assert text in str(caught.value)
    assert str(caught.value).startswith(f"{name} = ")


@pytest.mark.parametrize(
    "given",
    [
        {"num_gpu_blocks_override": 9, "num_blocks": 8},
        {"enforce_eager": True, "compile": "inductor"},
        {"enforce_eager": True, "graph_batch_sizes": [1]},
        {"num_gpu_blocks_override": 9, "num_kvcache_blocks": 8},
        {"spec_method": "ngram", "speculative_config": {"method": "suffix"}},
    ],
)
def test_two_names_of_one_argument_must_agree(given: dict[str, Any]) -> None:
    with pytest.raises(InvalidInputError, match="give one of them"):
        LLM("m", **given)


def test_keys_of_the_speculative_config_may_be_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    config = config_of(monkeypatch, spec_method="ngram", spec_tokens=3)
    assert config.speculation is not None
    assert config.speculation.method == "ngram"
    assert config.speculation.num_speculative_tokens == 3


def test_zero_is_not_false_and_one_is_not_true() -> None:
    for name, value in {"enable_lora": 0, "data_parallel_size": True, "nnodes": True}.items():
        with pytest.raises(InvalidInputError, match=f"^{name} = "):
            translate(name, value, {})


@pytest.mark.parametrize("table", [ENGINE, SERVER, CALL, SPECULATION])
def test_each_row_names_an_alternative_unless_it_accepts_every_value(table: Any) -> None:
    for name, row in table.items():
        takes_all = row.same_as or any(
            one.__name__ == "_any" for one in row.harmless if callable(one)
        )
        assert row.instead or takes_all, name
    arguments = EngineConfig().arguments()
    assert not set(ENGINE) & set(arguments)
    for row in ENGINE.values():
        assert {row.same_as} - {""} <= set(arguments)
        for ours in row.as_ours.values():
            assert set(ours) <= set(arguments)
