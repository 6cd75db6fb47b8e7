"""Folders of tiny models and drafters with random weights, whose tensors have published names."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import PreTrainedModel

from pagespec.compile.load.mtp import mtp_config
from pagespec.compile.model.mtp_head import MtpHead
from tests.support.models import tiny_model
from tests.support.quantized_files import FP8_CONFIG, fp8_blocks

# Fields of the hub's configs that transformers' own classes do not have.
MTP_FIELDS: dict[str, dict[str, Any]] = {
    "deepseek_v3": {},
    "glm4_moe": {},
    "qwen3_next": {"mtp_num_hidden_layers": 1},
    "qwen3_5_text": {"mtp_num_hidden_layers": 1},
}
GLM = {
    "num_attention_heads": 4,
    "head_dim": 16,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "moe_intermediate_size": 32,
    "first_k_dense_replace": 1,
}
_QWEN = {"eh_proj": "fc", "enorm": "pre_fc_norm_embedding", "hnorm": "pre_fc_norm_hidden"}


def add_tensors(folder: Path, tensors: Mapping[str, Tensor]) -> None:
    """Add tensors to a folder's only file of weights, or create it."""
    file = folder / "model.safetensors"
    known = load_file(file) if file.is_file() else {}
    save_file({n: t.contiguous() for n, t in (known | tensors).items()}, file, {"format": "pt"})


def edit_config(folder: Path, **fields: Any) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | fields))


def random_mtp(main: PreTrainedModel) -> MtpHead:
    """The layer for multi-token prediction of a tiny model with random weights, tied to it."""
    with torch.random.fork_rng():
        torch.manual_seed(7)
        module = MtpHead._from_config(mtp_config(main.config, "tiny"), main=main)
        with torch.no_grad():
            for name, parameter in module.named_parameters():
                if parameter.dim() >= 2:
                    parameter.normal_(0.0, 1.6 / parameter.shape[-1] ** 0.5)
                elif "norm" in name:
                    parameter.add_(torch.randn_like(parameter) * 0.1)
    module.tie(main, main.lm_head)
    return module.eval()


def published_mtp(
    module: MtpHead, num_layers: int, *, is_qwen: bool
) -> Iterator[tuple[str, Tensor]]:
    """The tensors of a layer under the names of Qwen's checkpoints, or of DeepSeek's and GLM's."""
    for name, tensor in module.state_dict().items():
        if not name.startswith("layers.0."):
            continue
        first, _, rest = name.removeprefix("layers.0.").partition(".")
        if first == "mtp_block":
            outer = "mtp.layers.0" if is_qwen else f"model.layers.{num_layers}"
            for part, value in _experts_apart(rest, tensor):
                yield f"{outer}.{part}", value
        elif is_qwen:
            yield f"mtp.{_QWEN.get(first, 'norm')}.{rest}", tensor
        else:
            own = "shared_head.norm" if first == "post_norm" else first
            yield f"model.layers.{num_layers}.{own}.{rest}", tensor


def _experts_apart(name: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
    prefix = "mlp.experts."
    for expert, values in enumerate(tensor if name.startswith(prefix) else ()):
        if name == f"{prefix}gate_up_proj":
            gate, up = values.chunk(2)
            yield f"{prefix}{expert}.gate_proj.weight", gate
            yield f"{prefix}{expert}.up_proj.weight", up
        else:
            yield f"{prefix}{expert}.down_proj.weight", values
    if not name.startswith(prefix):
        yield name, tensor


def save_with_mtp(folder: Path, arch: str, **overrides: Any) -> tuple[PreTrainedModel, MtpHead]:
    """A tiny model with a layer for multi-token prediction, in one folder.

    Args:
        overrides: fields of its config.
    """
    main = tiny_model(arch, **(GLM if arch == "glm4_moe" else {}) | overrides)
    fields = MTP_FIELDS[arch] if arch.startswith("qwen") else {}
    for name, value in fields.items():
        setattr(main.config, name, value)
    main.save_pretrained(folder)
    module = random_mtp(main)
    num_layers = main.config.num_hidden_layers
    tensors = dict(published_mtp(module, num_layers, is_qwen=arch.startswith("qwen")))
    if not arch.startswith("qwen"):  # copies that the checkpoints have
        copies = ("embed_tokens.weight", "shared_head.head.weight")
        tensors |= {f"model.layers.{num_layers}.{n}": torch.ones(2, 2) for n in copies}
    add_tensors(folder, tensors)
    return main, module


def quantize_files(folder: Path, excluded: Sequence[str] = ()) -> None:
    """Store the linear layers of a folder, its drafter's too, in FP8 with blocks of 128 x 128.

    Args:
        excluded: names of layers to leave as they are. So are heads and experts.
    """
    file = folder / "model.safetensors"
    left = ["lm_head", *excluded]
    tensors: dict[str, Tensor] = {}
    for name, tensor in load_file(file).items():
        layer = name.removesuffix(".weight")
        if layer.endswith("_proj") and layer not in left and "experts" not in layer:
            parts, _ = fp8_blocks(tensor)
            tensors |= {f"{layer}.{end}": part.contiguous() for end, part in parts.items()}
        else:
            tensors[name] = tensor
    save_file(tensors, file, {"format": "pt"})
    edit_config(folder, quantization_config={**FP8_CONFIG, "modules_to_not_convert": left})


# EAGLE-3 ------------------------------------------------------------------------------------------

EAGLE3_SIZES = {"hidden_size": 32, "num_heads": 4, "num_kv_heads": 2, "head_dim": 8, "width": 48}


def eagle3_tensors(
    target: PreTrainedModel,
    draft_vocab_size: int,
    *,
    first: str = "midlayer",
    num_layers: int = 1,
    norms: str = "",
    has_head_norms: bool = False,
    has_embedding: bool = True,
) -> dict[str, Tensor]:
    """Random tensors of a drafter under their published names.

    Args:
        first: prefix of the first layer.
        norms: "input_norm" or "fc_norm" for norms before ``fc``.
        has_head_norms: whether queries and keys are normed, as in Qwen3.
    """
    sizes, target_size = EAGLE3_SIZES, target.config.hidden_size
    size, width, dim = sizes["hidden_size"], sizes["width"], sizes["head_dim"]
    generator = torch.Generator().manual_seed(11)

    def matrix(num_outputs: int, num_inputs: int) -> Tensor:
        return torch.randn(num_outputs, num_inputs, generator=generator) * 1.2 / num_inputs**0.5

    def norm(num: int) -> Tensor:
        return 1 + torch.randn(num, generator=generator) * 0.1

    def layer(prefix: str, num_inputs: int) -> Iterator[tuple[str, Tensor]]:
        num_kv = sizes["num_kv_heads"] * dim
        for name, outputs in (("q", sizes["num_heads"] * dim), ("k", num_kv), ("v", num_kv)):
            yield f"{prefix}.self_attn.{name}_proj.weight", matrix(outputs, num_inputs)
        yield f"{prefix}.self_attn.o_proj.weight", matrix(size, sizes["num_heads"] * dim)
        for name in ("q_norm", "k_norm") if has_head_norms else ():
            yield f"{prefix}.self_attn.{name}.weight", norm(dim)
        for name in ("gate", "up"):
            yield f"{prefix}.mlp.{name}_proj.weight", matrix(width, size)
        yield f"{prefix}.mlp.down_proj.weight", matrix(size, width)
        for name in ("input_layernorm", "post_attention_layernorm"):
            yield f"{prefix}.{name}.weight", norm(size)

    vocab_size = target.config.vocab_size
    found = dict(layer(first, 2 * size)) | {f"{first}.hidden_norm.weight": norm(size)}
    for number in range(1, num_layers):
        found |= layer(f"layers.{number}", size)
    found["fc.weight"] = matrix(size, 3 * target_size)
    if norms == "input_norm":
        found["input_norm.weight"] = norm(3 * target_size)
    elif norms == "fc_norm":
        found |= {f"fc_norm.{i}.weight": norm(target_size) for i in range(3)}
    found["norm.weight"] = norm(size)
    found["lm_head.weight"] = matrix(draft_vocab_size, size) * 2
    ids = torch.randperm(vocab_size, generator=generator)[:draft_vocab_size].sort().values
    found["d2t"] = ids - torch.arange(draft_vocab_size)
    found["t2d"] = torch.zeros(vocab_size, dtype=torch.bool).index_fill_(0, ids, True)
    if has_embedding:
        found["embed_tokens.weight"] = torch.randn(vocab_size, size, generator=generator)
    return found


def eagle3_config(
    target: PreTrainedModel, draft_vocab_size: int, model_type: str = "llama", num_layers: int = 1
) -> dict[str, Any]:
    """The config of the decoder layers, in the form of SpecForge."""
    sizes = EAGLE3_SIZES
    return {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": model_type,
        "hidden_size": sizes["hidden_size"],
        "intermediate_size": sizes["width"],
        "num_attention_heads": sizes["num_heads"],
        "num_key_value_heads": sizes["num_kv_heads"],
        "head_dim": sizes["head_dim"],
        "num_hidden_layers": num_layers,
        "max_position_embeddings": 64,  # drafters are trained on short texts
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "vocab_size": target.config.vocab_size,
        "draft_vocab_size": draft_vocab_size,
        "target_hidden_size": target.config.hidden_size,
        "torch_dtype": "bfloat16",
        "tie_word_embeddings": False,
    }


def speculators_config(layers: dict[str, Any], **fields: Any) -> dict[str, Any]:
    """The same config in the form of the package speculators."""
    inner = {k: v for k, v in layers.items() if k not in ("architectures", "draft_vocab_size")}
    return {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        "speculators_version": "0.9.0",
        "draft_vocab_size": layers["draft_vocab_size"],
        "target_hidden_size": layers["target_hidden_size"],
        "transformer_layer_config": inner,
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 3}],
            "verifier": {"name_or_path": "tiny", "architectures": ["LlamaForCausalLM"]},
        },
        **fields,
    }


def save_eagle3(folder: Path, config: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
    """A drafter's folder."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    add_tensors(folder, tensors)
