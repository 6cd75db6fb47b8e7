"""Shards of tiny models against the whole model; ranks are threads."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from pagespec.compile.load import tensor_parallel
from pagespec.compile.load.tensor_parallel import shard_model, vocab_sizes
from pagespec.compile.model.loaded import Shard
from pagespec.errors import InvalidInputError, UnsupportedModelError
from pagespec.kernels.collectives.communicator import LoneRank, communicator_scope
from pagespec.kernels.sampling.sampler import GROUP
from tests.support.models import ARCHITECTURES, BY_DAY, TP_OVERRIDES, WITHOUT_PLAN, tiny_model
from tests.support.ranks import ThreadCommunicator, run_threads

PROMPT = torch.randint(2, 300, (2, 30), generator=torch.Generator().manual_seed(0))


def tiny(arch: str, num_ranks: int, **overrides: Any) -> PreTrainedModel:
    options = TP_OVERRIDES.get(arch, {}) if num_ranks == 4 else {}
    model = tiny_model(arch, **{**options, **overrides})
    model.set_attn_implementation("eager")
    return model


def logits_of(model: PreTrainedModel) -> Tensor:
    with torch.inference_mode():
        logits: Tensor = model(PROMPT, use_cache=False).logits
    return logits


def shards_of(model: PreTrainedModel, num_ranks: int) -> list[tuple[PreTrainedModel, Any]]:
    """Every rank's part of the model, and the sizes of its head."""
    shards = []
    for rank in range(num_ranks):
        part = copy.deepcopy(model)
        sizes = shard_model(part, Shard(rank, num_ranks)).sizes
        for module in part.modules():
            # By this transformers' eager attention repeats keys; the engine's looks at shapes.
            sharded: Any = module
            if hasattr(module, "num_key_value_groups") and getattr(module, "q_proj", None):
                groups = sharded.q_proj.weight.shape[0] // sharded.k_proj.weight.shape[0]
                sharded.num_key_value_groups = groups
        shards.append((part, sizes))
    return shards


def sharded_logits(model: PreTrainedModel, num_ranks: int) -> list[Tensor]:
    """The final logits of each rank."""
    shards = shards_of(model, num_ranks)

    def run(communicator: ThreadCommunicator) -> Tensor:
        part, sizes = shards[communicator.rank]
        with communicator_scope(communicator):
            logits = logits_of(part)
        if sizes is not None:
            assert sizes == vocab_sizes(model.config.vocab_size, num_ranks)
            assert logits.shape[-1] == sizes[communicator.rank]
            logits = communicator.all_gather(logits, sizes)
        return logits

    found: list[Tensor] = run_threads(num_ranks, run)
    return found


def error_of(model: PreTrainedModel, num_ranks: int) -> float:
    """The error of the ranks' logits against the whole model's; infinite if ranks differ."""
    whole, ranks = logits_of(model), sharded_logits(model, num_ranks)
    if not all(torch.equal(logits, ranks[0]) for logits in ranks):
        return torch.inf
    return float((ranks[0] - whole).abs().max() / whole.abs().max())


def check_elements(model: PreTrainedModel, num_ranks: int) -> None:
    """Each element of a parameter is on equally many ranks: none is lost or duplicated."""
    numbered = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in numbered.parameters():
            parameter.copy_(torch.arange(parameter.numel()).view(parameter.shape))
    shards = [dict(part.named_parameters()) for part, _ in shards_of(numbered, num_ranks)]
    num_shared = 0
    for name, parameter in numbered.named_parameters():
        ids = torch.cat([shard[name].reshape(-1) for shard in shards]).long()
        counts = torch.bincount(ids, minlength=parameter.numel())
        (count,) = counts.unique().tolist()
        assert count in (1, 2, num_ranks), name
        num_shared += count < num_ranks
        assert all(shard[name].is_leaf for shard in shards)
    assert num_shared


WITH_PLAN = [arch for arch in ARCHITECTURES if arch not in WITHOUT_PLAN]
BY_DAY_WITH_PLAN = [param for param in BY_DAY if param.values[0] not in WITHOUT_PLAN]


@pytest.mark.parametrize("num_ranks", [2, 4])
@pytest.mark.parametrize("arch", BY_DAY_WITH_PLAN)
def test_the_ranks_together_are_the_model(arch: str, num_ranks: int) -> None:
    model = tiny(arch, num_ranks)
    assert error_of(model, num_ranks) < 1e-5
    check_elements(model, num_ranks)


@pytest.mark.parametrize(
    ("arch", "overrides"),
    [
        # Norms over all heads: their projections are gathered before.
        ("olmo2", {"num_attention_heads": 4}),
        ("olmo2", {"num_attention_heads": 4, "num_key_value_heads": 4}),
        # Experts whose inputs come first.
        ("llama4_text", {"num_attention_heads": 4, "intermediate_size": 48}),
        # One KV head for all, and biases.
        ("llama", {"num_attention_heads": 4, "num_key_value_heads": 1}),
        (
            "llama",
            {"num_attention_heads": 8, "head_dim": 8, "attention_bias": True, "mlp_bias": True},
        ),
        # A head in parts, and one whole because it has too few tokens.
        ("llama", {"num_attention_heads": 4, "vocab_size": 4 * GROUP + 5}),
        ("llama", {"num_attention_heads": 4, "vocab_size": 3 * GROUP}),
        ("qwen3", {"vocab_size": 4 * GROUP, "tie_word_embeddings": True}),
    ],
)
def test_other_plans_and_shapes(arch: str, overrides: dict[str, Any]) -> None:
    model = tiny(arch, 4, **overrides)
    assert error_of(model, 4) < 1e-5
    check_elements(model, 4)


@pytest.mark.parametrize("is_tied", [False, True])
def test_a_head_holds_its_own_part_alone(is_tied: bool) -> None:
    model = tiny("qwen3", 2, vocab_size=2 * GROUP, tie_word_embeddings=is_tied)
    for part, sizes in shards_of(model, 2):
        assert sizes == [GROUP, GROUP]
        head, embedding = part.get_output_embeddings().weight, part.get_input_embeddings().weight
        held = head.untyped_storage()
        assert (held.data_ptr() == embedding.untyped_storage().data_ptr()) == is_tied
        assert held.nbytes() == (embedding if is_tied else head).nbytes


@pytest.mark.parametrize("is_tied", [False, True])
def test_a_rank_can_keep_the_whole_head_in_the_memory_of_its_part(is_tied: bool) -> None:
    model = tiny("qwen3", 2, vocab_size=2 * GROUP, tie_word_embeddings=is_tied)
    expected = model.get_output_embeddings().weight.clone()
    for rank in range(2):
        part = copy.deepcopy(model)
        sizes, whole = shard_model(part, Shard(rank, 2), keeps_head=True)
        own = part.get_output_embeddings().weight
        assert sizes == [GROUP, GROUP]
        assert torch.equal(own, expected.split(sizes)[rank])
        assert whole is not None
        assert torch.equal(whole.weight, expected)
        held, kept = own.untyped_storage(), whole.weight.untyped_storage()
        assert held.data_ptr() == kept.data_ptr()
        assert kept.nbytes() == expected.nbytes


def test_a_head_that_is_not_cut_is_not_kept_twice() -> None:
    model = tiny("qwen3", 2, vocab_size=GROUP)
    assert shard_model(model, Shard(0, 2), keeps_head=True) == (None, None)


def test_tokens_of_a_head_are_shared_in_whole_groups() -> None:
    assert vocab_sizes(320, 1) is None
    assert vocab_sizes(GROUP, 2) is None
    assert vocab_sizes(GROUP + 1, 2) == [GROUP, 1]
    for vocab_size in (1000, 4096, 49152, 151936, 262145):
        for num_ranks in (2, 3, 4, 8):
            sizes = vocab_sizes(vocab_size, num_ranks)
            assert sizes is None or (
                sum(sizes) == vocab_size
                and not any(size % GROUP for size in sizes[:-1])
                and min(sizes) > 0
                and max(sizes) - min(sizes) < 2 * GROUP
            )


# Errors that must be seen -----------------------------------------------------------------------


def _plant_bias_on_every_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    style = tensor_parallel.Style("inputs", tensor_parallel.Reduced)
    monkeypatch.setitem(tensor_parallel.STYLES, "rowwise", style)


def _plant_unpacked(monkeypatch: pytest.MonkeyPatch) -> None:
    style = tensor_parallel.Style("outputs")
    monkeypatch.setitem(tensor_parallel.STYLES, "packed_colwise", style)


def _plant_no_sum(monkeypatch: pytest.MonkeyPatch) -> None:
    style = tensor_parallel.Style("inputs", type("_Summand", (), {}))
    monkeypatch.setitem(tensor_parallel.STYLES, "rowwise", style)


@pytest.mark.parametrize(
    ("arch", "plant"),
    [
        ("gpt_neox", _plant_bias_on_every_rank),
        ("qwen3_moe", _plant_unpacked),
        ("llama", _plant_no_sum),
    ],
)
def test_a_planted_error_is_seen(
    arch: str, plant: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(monkeypatch)
    assert error_of(tiny(arch, 2), 2) > 1e-2


# Refusals ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("arch", [*WITHOUT_PLAN, "jetmoe"])
def test_a_model_without_a_plan_is_refused_by_name(arch: str) -> None:
    model = tiny_model(arch)
    with pytest.raises(UnsupportedModelError, match=f"{type(model).__name__}.*no tensor-parallel"):
        shard_model(model, Shard(0, 2))


@pytest.mark.parametrize(
    ("arch", "overrides", "num_ranks", "what"),
    [
        ("llama", {}, 4, "6 heads of q_proj"),
        ("llama", {"num_key_value_heads": 3}, 2, "3 heads of k_proj"),
        ("llama", {"num_attention_heads": 12, "num_key_value_heads": 3}, 4, "3 heads of k_proj"),
        ("gpt_neox", {"num_attention_heads": 6}, 4, "6 heads of query_key_value"),
        ("llama", {"intermediate_size": 97}, 2, "gate_proj.weight, which has 97 in dimension 0"),
        ("qwen3_moe", {"moe_intermediate_size": 31}, 2, "gate_up_proj, which has 62 in dim"),
    ],
)
def test_what_cannot_be_divided_is_named(
    arch: str, overrides: dict[str, Any], num_ranks: int, what: str
) -> None:
    with pytest.raises(InvalidInputError, match=what) as caught:
        shard_model(tiny_model(arch, **overrides), Shard(0, num_ranks))
    assert caught.value.field == "tensor_parallel_size"
    assert caught.value.value == num_ranks


@pytest.mark.parametrize(
    ("plan", "what"),
    [
        ({"model.layers.*.self_attn.q_proj": "diagonal"}, "style 'diagonal' for .*q_proj"),
        ({"model.layers.*.mlp": "rowwise"}, "layers.0.mlp, a LlamaMLP and no nn.Linear"),
        ({"model.norm": "colwise_rep"}, "model.norm, a LlamaRMSNorm and no nn.Linear"),
    ],
)
def test_a_plan_that_is_not_understood_is_refused(
    plan: dict[str, str], what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny_model("llama")
    whole = {"model.layers.*.mlp.down_proj": "rowwise"} | plan
    monkeypatch.setattr(type(model), "tp_plan", property(lambda _: whole))
    with pytest.raises(UnsupportedModelError, match=what):
        shard_model(model, Shard(0, 2))


def test_a_shard_computes_in_a_scope_alone() -> None:
    (part, _), _ = shards_of(tiny("llama", 2), 2)
    with pytest.raises(RuntimeError, match="communicator_scope"):
        logits_of(part)
    with communicator_scope(LoneRank(0, 2)):
        assert logits_of(part).shape[-1] == GROUP
