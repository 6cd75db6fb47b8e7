"""Drafters with a model against transformers, or for EAGLE-3 against plain torch: tiny random
models in folders with published names, in float32."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.generation.candidate_generator import MTPCandidateGenerator

from pagespec.compile.load.drafters import load_drafter, target_aux_layers
from pagespec.compile.load.load import load_model
from tests.golden.harness import MAX_RELATIVE_ERROR
from tests.support.draft_files import (
    EAGLE3_SIZES,
    MTP_FIELDS,
    eagle3_config,
    eagle3_tensors,
    save_eagle3,
    save_with_mtp,
    speculators_config,
)
from tests.support.drafting import Drafting, Target
from tests.support.models import VOCAB_SIZE, tiny_model

IDS = [(7 * i * i + 3) % VOCAB_SIZE for i in range(70)]
CHUNKS = (0, 1, 20, 33, 69)
"""Bounds of the steps that compute the slots."""
DRAFT_VOCAB_SIZE = 96
Passes = Callable[[list[int], Tensor], tuple[Tensor, Tensor]]
"""From the tokens and the hidden states of all slots to logits and the next hidden states."""


def assert_near(found: Tensor, expected: Tensor) -> None:
    error = (found - expected).abs().max() / expected.abs().max()
    assert float(error) < MAX_RELATIVE_ERROR


def chunked(drafting: Drafting, ids: list[int], hidden: Tensor) -> tuple[Tensor, Tensor]:
    """Logits and hidden states of the slots, computed in several steps."""
    parts = [drafting(ids[begin:end], hidden[begin:end], begin) for begin, end in pairwise(CHUNKS)]
    return tuple(torch.cat([getattr(p, n) for p in parts]) for n in ("logits", "hidden"))  # type: ignore[return-value]


def reference_drafts(passes: Passes, ids: list[int], hidden: Tensor, num_drafts: int) -> list[int]:
    """Greedy drafts; each pass computes all slots again."""
    drafts: list[int] = []
    for _ in range(num_drafts):
        logits, recycled = passes([*ids, *drafts], hidden)
        drafts.append(int(logits[-1].argmax()))
        hidden = torch.cat([hidden, recycled[-1:]])
    return drafts


# MTP ----------------------------------------------------------------------------------------------


def mtp_reference(main: PreTrainedModel, layer: Any) -> Passes:
    """transformers' own layer, eagerly, without a cache."""
    rotary = main.model.rotary_emb
    for module in (main, layer):
        module.config._attn_implementation = "eager"

    def passes(ids: list[int], hidden: Tensor) -> tuple[Tensor, Tensor]:
        embedded = main.get_input_embeddings()(torch.tensor([ids]))
        positions = torch.arange(1, len(ids) + 1).unsqueeze(0)
        axes = positions.expand(3, 1, -1) if hasattr(rotary, "mrope_section") else positions
        with torch.inference_mode():
            result = layer(
                embedded,
                hidden.unsqueeze(0),
                position_embeddings=rotary(embedded, axes),
                attention_mask=torch.full([len(ids)] * 2, float("-inf")).triu(1)[None, None],
                position_ids=positions,
                past_key_values=None,
            )
            return main.lm_head(result)[0], result[0]

    return passes


@pytest.mark.parametrize("arch", MTP_FIELDS)
def test_mtp_computes_what_transformers_does(arch: str, tmp_path: Path) -> None:
    main, module = save_with_mtp(tmp_path, arch)
    loaded = load_model(tmp_path)
    drafter = load_drafter("mtp", None, loaded)
    for name, tensor in module.state_dict().items():
        assert torch.equal(drafter.loaded.module.state_dict()[name], tensor), name
    target, drafting = Target(loaded), Drafting(drafter)
    hidden = target(IDS[:-1]).hidden
    assert hidden is not None
    passes = mtp_reference(main, module.layers[0])
    with torch.inference_mode():
        states = main(torch.tensor([IDS[:-1]]), output_hidden_states=True).hidden_states[-1][0]
    assert_near(hidden, states)
    logits, recycled = passes(IDS[1:], states)
    found = chunked(drafting, IDS[1:], hidden)
    assert_near(found[0], logits)
    assert_near(found[1], recycled)
    begin = CHUNKS[-2]
    drafts = drafting.greedy(IDS[1:][begin:], hidden[begin:], begin, 3)
    assert drafts == reference_drafts(passes, IDS[1:], states, 3)


@pytest.mark.parametrize("arch", ["deepseek_v3", "glm4_moe"])
def test_mtp_drafts_are_those_of_transformers_generate(
    arch: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    main, _ = save_with_mtp(tmp_path, arch)
    # It names the layers of published sizes.
    pattern = rf"model\.layers\.{main.config.num_hidden_layers}\..*"
    monkeypatch.setattr(type(main), "_keys_to_ignore_on_load_unexpected", [pattern])
    found: list[tuple[int, int]] = []
    own = MTPCandidateGenerator.get_candidates

    def get_candidates(self: Any, input_ids: Tensor, *args: Any, **kwargs: Any) -> Any:
        result = own(self, input_ids, *args, **kwargs)
        num_known = input_ids.shape[1]
        if result[0].shape[1] > num_known:
            found.append((num_known, int(result[0][0, num_known])))
        return result

    monkeypatch.setattr(MTPCandidateGenerator, "get_candidates", get_candidates)
    judge = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    judge.generation_config.eos_token_id = None
    prompt = torch.tensor([IDS[:20]])
    (text,) = judge.generate(
        prompt, use_mtp=True, do_sample=False, max_new_tokens=24, pad_token_id=0
    ).tolist()
    assert len(found) >= 12
    loaded = load_model(tmp_path)
    hidden = Target(loaded)(text[:-1]).hidden
    logits = Drafting(load_drafter("mtp", None, loaded))(text[1:], hidden).logits
    drafts = logits.argmax(-1).tolist()
    assert [(n, drafts[n - 2]) for n, _ in found] == found


# EAGLE-3 ------------------------------------------------------------------------------------------


def eagle3_reference(
    tensors: Mapping[str, Tensor],
    embedding: Tensor,
    *,
    first: str,
    num_layers: int,
    is_norm_residual: bool,
    has_norm_output: bool,
) -> Passes:
    """The drafter in plain torch. Hidden states of the target are those of three layers."""
    sizes = EAGLE3_SIZES
    size, dim = sizes["hidden_size"], sizes["head_dim"]
    ids_of_head = torch.arange(DRAFT_VOCAB_SIZE) + tensors["d2t"]

    def norm(name: str, x: Tensor) -> Tensor:
        return F.rms_norm(x, x.shape[-1:], tensors[f"{name}.weight"], 1e-5)

    def heads(prefix: str, name: str, x: Tensor, num_heads: int) -> Tensor:
        y = F.linear(x, tensors[f"{prefix}.self_attn.{name}_proj.weight"]).view(len(x), -1, dim)
        if f"{prefix}.self_attn.{name}_norm.weight" in tensors:
            y = norm(f"{prefix}.self_attn.{name}_norm", y)
        assert y.shape[1] == num_heads
        return y.transpose(0, 1)

    def rotated(x: Tensor) -> Tensor:
        angles = torch.outer(
            torch.arange(x.shape[1]).float(), 10000.0 ** (-torch.arange(0, dim, 2) / dim)
        )
        cos, sin = angles.cos(), angles.sin()
        one, two = x.chunk(2, -1)
        return torch.cat([one * cos - two * sin, two * cos + one * sin], -1)

    def layer(prefix: str, x: Tensor, residual: Tensor) -> Tensor:
        q = rotated(heads(prefix, "q", x, sizes["num_heads"]))
        k = rotated(heads(prefix, "k", x, sizes["num_kv_heads"]))
        v = heads(prefix, "v", x, sizes["num_kv_heads"])
        group = sizes["num_heads"] // sizes["num_kv_heads"]
        scores = q @ k.repeat_interleave(group, 0).transpose(1, 2) / dim**0.5
        scores += torch.full_like(scores, float("-inf")).triu(1)
        attended = scores.softmax(-1) @ v.repeat_interleave(group, 0)
        flat = attended.transpose(0, 1).flatten(1)
        between = residual + F.linear(flat, tensors[f"{prefix}.self_attn.o_proj.weight"])
        y = norm(f"{prefix}.post_attention_layernorm", between)
        gate, up = (F.linear(y, tensors[f"{prefix}.mlp.{n}_proj.weight"]) for n in ("gate", "up"))
        return between + F.linear(F.silu(gate) * up, tensors[f"{prefix}.mlp.down_proj.weight"])

    def combined(three: Tensor) -> Tensor:
        if "input_norm.weight" in tensors:
            three = norm("input_norm", three)
        if "fc_norm.0.weight" in tensors:
            parts = three.chunk(3, -1)
            three = torch.cat([norm(f"fc_norm.{i}", part) for i, part in enumerate(parts)], -1)
        return F.linear(three, tensors["fc.weight"])

    def passes(ids: list[int], hidden: Tensor) -> tuple[Tensor, Tensor]:
        with torch.inference_mode():
            x = combined(hidden) if hidden.shape[1] != size else hidden
            normed = norm(f"{first}.hidden_norm", x)
            both = torch.cat([norm(f"{first}.input_layernorm", embedding[ids]), normed], -1)
            x = layer(first, both, normed if is_norm_residual else x)
            for number in range(1, num_layers):
                prefix = f"layers.{number}"
                x = layer(prefix, norm(f"{prefix}.input_layernorm", x), x)
            last = norm("norm", x)
            logits = torch.full((len(ids), VOCAB_SIZE), float("-inf"))
            logits[:, ids_of_head] = F.linear(last, tensors["lm_head.weight"])
            return logits, last if has_norm_output else x

    def of_combined(ids: list[int], hidden: Tensor) -> tuple[Tensor, Tensor]:
        return passes(ids, hidden)

    of_combined.combined = combined  # type: ignore[attr-defined]
    return of_combined


VARIANTS: dict[str, dict[str, Any]] = {
    "specforge": {},
    "speculators": {"is_of_speculators": True},
    "norm_before_residual": {"is_of_speculators": True, "is_norm_residual": True},
    "input_norm": {"norms": "input_norm"},
    "fc_norm": {"is_of_speculators": True, "norms": "fc_norm", "has_norm_output": True},
    "two_layers": {"num_layers": 2},
    "qwen3": {"is_of_speculators": True, "model_type": "qwen3"},
    "layers": {"layer_ids": [0, 3, 4]},
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_eagle3_computes_what_plain_torch_does(variant: str, tmp_path: Path) -> None:
    given = {"is_of_speculators": False, "model_type": "llama", "num_layers": 1} | VARIANTS[variant]
    layer_ids = given.get("layer_ids")
    main = tiny_model("llama", num_hidden_layers=6 if layer_ids is None else 4)
    first = "layers.0" if given["is_of_speculators"] else "midlayer"
    tensors = eagle3_tensors(
        main,
        DRAFT_VOCAB_SIZE,
        first=first,
        num_layers=given["num_layers"],
        norms=given.get("norms", ""),
        has_head_norms=given["model_type"] == "qwen3",
    )
    config = eagle3_config(main, DRAFT_VOCAB_SIZE, given["model_type"], given["num_layers"])
    flags = {
        "norm_before_residual": given.get("is_norm_residual", False),
        "norm_output": given.get("has_norm_output", False),
    }
    if given["is_of_speculators"]:
        config = speculators_config(config, **flags)
    elif layer_ids is not None:
        config["eagle_config"] = {"eagle_aux_hidden_state_layer_ids": layer_ids}
    save_eagle3(tmp_path, config, tensors)

    loaded = load_model(main)
    aux = target_aux_layers("eagle3", str(tmp_path), loaded)
    assert aux == tuple(layer_ids or (2, 3, 3))
    loaded = replace(loaded, aux_layers=aux)
    hidden = Target(loaded)(IDS[:-1]).aux
    with torch.inference_mode():
        states = main(torch.tensor([IDS[:-1]]), output_hidden_states=True).hidden_states
        layers: list[Any] = []
        main.model.layers[-1].register_forward_hook(lambda *call: layers.append(call[2]))
        main(torch.tensor([IDS[:-1]]))
    last = layers[0][0] if isinstance(layers[0], tuple) else layers[0]
    entering = [*states[:-1], last.view_as(states[0])]
    expected = torch.cat([entering[n][0] for n in aux], -1)
    assert hidden is not None
    assert_near(hidden, expected)

    passes: Any = eagle3_reference(
        tensors,
        tensors["embed_tokens.weight"],
        first=first,
        num_layers=given["num_layers"],
        is_norm_residual=flags["norm_before_residual"],
        has_norm_output=flags["norm_output"],
    )
    drafting = Drafting(load_drafter("eagle3", str(tmp_path), loaded))
    logits, recycled = passes(IDS[1:], expected)
    found = chunked(drafting, IDS[1:], hidden)
    is_drafted = logits.isfinite()
    assert torch.equal(found[0].isfinite(), is_drafted)
    assert int(is_drafted[0].sum()) == DRAFT_VOCAB_SIZE
    assert_near(found[0][is_drafted], logits[is_drafted])
    assert_near(found[1], recycled)
    begin = CHUNKS[-2]
    drafts = drafting.greedy(IDS[1:][begin:], hidden[begin:], begin, 3)
    combined = passes.combined(expected)
    assert drafts == reference_drafts(passes, IDS[1:], combined, 3)
