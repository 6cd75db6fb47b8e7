"""The training of an EAGLE-3 head, with a tiny random model."""

from __future__ import annotations

import json
import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from torch.nn.functional import scaled_dot_product_attention
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from benchmarks import train_drafter
from benchmarks.draft_text import KINDS, Answer, Prompts, templates, topics, write_text
from benchmarks.train_drafter import (
    Batch,
    Trainer,
    acceptance,
    batches,
    frequent_ids,
    new_head,
    num_accepted,
    tokens_per_step,
)

HEAD_TENSORS = {
    "fc.weight": (32, 96),
    "midlayer.self_attn.q_proj.weight": (32, 64),
    "midlayer.self_attn.k_proj.weight": (16, 64),
    "midlayer.self_attn.v_proj.weight": (16, 64),
    "midlayer.self_attn.o_proj.weight": (32, 32),
    "midlayer.mlp.gate_proj.weight": (48, 32),
    "midlayer.mlp.up_proj.weight": (48, 32),
    "midlayer.mlp.down_proj.weight": (32, 48),
    "midlayer.input_layernorm.weight": (32,),
    "midlayer.hidden_norm.weight": (32,),
    "midlayer.post_attention_layernorm.weight": (32,),
    "norm.weight": (32,),
    "lm_head.weight": (40, 32),
    "d2t": (40,),
    "t2d": (128,),
}
VOCAB_SIZE = 128


def tiny_target() -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=32,
        intermediate_size=48,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_hidden_layers=5,
        max_position_embeddings=1024,
        initializer_range=0.3,
        tie_word_embeddings=True,
        eos_token_id=2,
    )
    return LlamaForCausalLM(config).eval().requires_grad_(False)


def tiny_answers(number: int, kind: str = "free") -> list[Answer]:
    rng = random.Random(1)
    return [
        Answer(kind, 0.0, 4, [rng.randrange(3, VOCAB_SIZE) for _ in range(rng.randrange(9, 30))])
        for _ in range(number)
    ]


def trainer_of(target: Any, answers: list[Answer], num_drafts: int = 3) -> Trainer:
    torch.manual_seed(1)
    head = new_head(target, frequent_ids(answers, 40, [2]))
    return Trainer(target, head, num_drafts, rate=1e-2)


class StepByStep:
    """Drafts one token at a time, with a cache, from one start."""

    def __init__(self, trainer: Trainer, token_ids: list[int]) -> None:
        self.target, self.head = trainer.target, trainer.head
        self.token_ids = token_ids
        self.states = trainer.read(Batch.of([Answer("free", 0.0, 1, token_ids)], "cpu"))[1][0]
        self.keys: list[torch.Tensor] = []
        self.values: list[torch.Tensor] = []

    def input(self, token: int, hidden: torch.Tensor, position: int) -> torch.Tensor:
        layer, attn = self.head.midlayer, self.head.midlayer.self_attn
        embed = self.target.get_input_embeddings().weight[token]
        x = torch.cat([layer.input_layernorm(embed), layer.hidden_norm(hidden)])
        q, k, v = (attn[f"{n}_proj"](x).view(1, -1, 1, 8) for n in "qkv")
        rope = self.head._rope[0](hidden, torch.tensor([[position]]))
        q, k = apply_rotary_pos_emb(q, k, *rope)
        self.keys.append(k)
        self.values.append(v)
        keys, values = torch.cat(self.keys, 2), torch.cat(self.values, 2)
        out = scaled_dot_product_attention(q, keys, values, enable_gqa=True).flatten()
        hidden = hidden + attn["o_proj"](out)
        return hidden + layer.mlp(layer.post_attention_layernorm(hidden))

    def draft(self, start: int, num_drafts: int) -> list[torch.Tensor]:
        """The logits of each draft; the tokens of the answer are inputs."""
        found = []
        for s in range(start + 1):
            hidden = self.input(self.token_ids[s + 1], self.head.fc(self.states[s]), s)
        found.append(self.head.logits(hidden))
        for j in range(1, num_drafts):
            hidden = self.input(self.token_ids[start + 1 + j], hidden, start + j)
            found.append(self.head.logits(hidden))
        return found


@torch.no_grad()
def test_all_starts_at_once_equal_drafting_step_by_step_with_a_cache() -> None:
    answers = tiny_answers(3)
    trainer = trainer_of(tiny_target(), answers)
    batch = Batch.of(answers, "cpu")
    embeds, aux, _ = trainer.read(batch)
    drafts = [trainer.head.logits(h) for h in trainer.head(embeds, aux, 3)]
    for row, answer in enumerate(answers):
        for start in (3, 5):
            wanted = StepByStep(trainer, answer.token_ids).draft(start, 3)
            for j in range(3):
                torch.testing.assert_close(drafts[j][row, start], wanted[j], atol=1e-5, rtol=1e-5)


@torch.no_grad()
def test_accepted_draft_tokens_are_those_before_the_first_difference() -> None:
    target, answers = tiny_target(), tiny_answers(4)
    trainer = trainer_of(target, answers)
    # Answers that the head itself continues: its first draft from start 3, then others.
    answer = answers[0].token_ids[:6]
    drafts = trainer.head.draft_ids
    right = int(drafts[StepByStep(trainer, [*answer, 0, 0, 0]).draft(4, 1)[0].argmax()])
    wrong = right - 1
    for token, number in ((right, 1), (wrong, 0)):
        batch = Batch.of([Answer("free", 0.0, 5, [*answer, token])], "cpu")
        assert num_accepted(trainer, batch) == [[number]]


def test_steps_lower_the_cross_entropy_of_each_draft() -> None:
    answers = tiny_answers(6)
    trainer = trainer_of(tiny_target(), answers)
    losses = [trainer.step(Batch.of(answers, "cpu"), 0.0) for _ in range(60)]
    assert losses[0].shape == (3,)
    assert (losses[-1] < 0.8 * losses[0]).all()


def test_acceptance_counts_only_draft_tokens_after_accepted_ones() -> None:
    counts = [[2, 0, 1, 1, 0], [0]]  # the last start of an answer has one place
    assert acceptance(counts, 3) == [3 / 6, 1 / 3, 0 / 1]
    assert acceptance([[]], 1) == [None]


def test_steps_begin_where_the_step_before_ended() -> None:
    counts = [[2, 9, 9, 0, 1, 9], [0]]
    assert tokens_per_step(counts, 2) == 7 / 4  # 3, 1, 2 tokens; 1 token
    assert tokens_per_step(counts, 1) == 7 / 4  # 2, 2, 2 tokens: fewer, then more; 1 token
    assert tokens_per_step([], 2) is None


def test_batches_have_each_answer_once_within_the_limit() -> None:
    answers = tiny_answers(50)
    for rng in (None, random.Random(0)):
        found = list(batches(answers, 128, "cpu", rng))
        assert all(b.token_ids.numel() <= 128 for b in found)
        rows = [row for b in found for row in zip(b.token_ids.tolist(), b.num_tokens, strict=True)]
        assert sorted(ids[: int(n)] for ids, n in rows) == sorted(a.token_ids for a in answers)


@pytest.mark.parametrize("kind", KINDS)
def test_prompts_of_the_test_share_no_template_and_no_topic(kind: str) -> None:
    for of in (templates, topics):
        trained, held_out = set(of(kind, False)), set(of(kind, True))
        assert len(trained) > len(held_out) > 1
        assert not trained & held_out
    prompts = Prompts(0)
    prompts.passages = {False: ["a passage of the training"], True: ["a passage of the test"]}
    test = {prompts.draw(kind, True) for _ in range(50)}
    assert len(test) > 3
    assert not test & {prompts.draw(kind, False) for _ in range(500)}
    assert not any("of the training" in text for text in test)


class FakeLlm:
    """Answers with tokens of a fixed cycle."""

    def __init__(self) -> None:
        self.tokenizer = SimpleNamespace(decode=lambda ids, **_: " ".join(map(str, ids)))
        self.prompts: list[str] = []

    def generate(self, texts: list[str], params: list[Any], **_: Any) -> list[Any]:
        self.prompts += texts
        answer = [3 + i % 7 for i in range(params[0].max_tokens)]
        output = SimpleNamespace(token_ids=answer)
        return [SimpleNamespace(prompt_token_ids=(9, 8), outputs=[output]) for _ in texts]


def test_text_is_of_all_kinds_and_ends_with_its_time() -> None:
    llm = FakeLlm()
    text = write_text(llm, 0.05, 8, 2, 5)
    assert {a.kind for a in text.training} == set(KINDS)
    assert [(a.kind, a.temperature) for a in text.test] == [
        (kind, t) for t in (0.0, 0.8) for kind in KINDS * 2
    ]
    assert text.num_tokens == 5 * len(text.training)
    assert any("3 4 5 6 7" in prompt for prompt in llm.prompts)  # a passage


def test_the_model_writes_the_text_of_its_drafter(tmp_path: Path) -> None:
    folder, file = tmp_path / "target", tmp_path / "text.json"
    tiny_target().save_pretrained(folder)
    words = Tokenizer(
        WordLevel({"<unk>": 0} | {f"w{i}": i for i in range(1, VOCAB_SIZE)}, unk_token="<unk>")
    )
    words.pre_tokenizer = Whitespace()
    template = "{% for message in messages %}w1 {{ message['content'] }}{% endfor %} w3"
    PreTrainedTokenizerFast(
        tokenizer_object=words, unk_token="<unk>", chat_template=template
    ).save_pretrained(folder)
    train_drafter.main(
        folder,
        tmp_path / "head",
        minutes=0.01,
        text_minutes=0.0,
        text=file,
        prompts_per_round=3,
        test_prompts=1,
        max_tokens=8,
        device="cpu",
    )
    text = json.loads(file.read_text())
    answers = [Answer(**a) for part in ("training", "test") for a in text[part]]
    assert len(answers) == 3 + 2 * len(KINDS)
    for answer in answers:
        prompt = answer.token_ids[: answer.num_prompt_tokens]
        assert (prompt[0], prompt[-1]) == (1, 3)
        assert 1 <= len(answer.token_ids) - len(prompt) <= 8
    assert (tmp_path / "head" / "model.safetensors").exists()


def test_a_head_is_trained_saved_and_measured(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = tiny_target()
    target.save_pretrained(tmp_path / "target")
    cycle = [3 + i % 37 for i in range(300)]
    training = [Answer("free", 0.5, 4, cycle[i : i + 24]) for i in range(64)]
    test = [Answer(kind, t, 4, cycle[9:33]) for kind in KINDS for t in (0.0, 0.8)]
    file = tmp_path / "text.json"
    text = {"training": [vars(a) for a in training], "test": [vars(a) for a in test]}
    file.write_text(json.dumps(text))
    train_drafter.main(
        tmp_path / "target",
        tmp_path / "head",
        minutes=0.05,
        text=file,
        draft_vocab_size=40,
        num_drafts=2,
        batch_tokens=512,
        rate=1e-2,
        device="cpu",
    )
    tensors = load_file(tmp_path / "head" / "model.safetensors")
    assert {name: tuple(t.shape) for name, t in tensors.items()} == {
        **HEAD_TENSORS, "lm_head.weight": (38, 32), "d2t": (38,)
    }  # fmt: skip
    ids = (tensors["d2t"] + torch.arange(38)).tolist()
    assert ids == tensors["t2d"].nonzero().flatten().tolist() == [2, *range(3, 40)]
    assert tensors["fc.weight"].dtype == torch.bfloat16
    config = json.loads((tmp_path / "head" / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLMEagle3"]
    assert (config["draft_vocab_size"], config["target_hidden_size"]) == (38, 32)
    assert config["eagle_config"]["eagle_aux_hidden_state_layer_ids"] == [2, 2, 2]
    shown = json.loads((tmp_path / "head" / "acceptance.json").read_text())
    assert [line["tokens"] for line in shown["lines"]] == 2 * [19, 19, 19, 19, 76]
    out = capsys.readouterr().out
    assert len([line for line in out.splitlines() if line.startswith("|")]) == 12
