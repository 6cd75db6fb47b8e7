"""Train an EAGLE-3 head for a model on text that the model wrote, and report its acceptance.

    python -m benchmarks.train_drafter MODEL OUT [--minutes 8] [--text-minutes 2] [--text FILE]

1. pagespec answers prompts of four kinds at temperatures of 0 to 1, for ``--text-minutes``.
2. The head learns the model's own next-token distributions (soft targets). Each start is unrolled:
   later draft tokens follow from the head's own hidden states, as when it drafts. Training ends
   with the time, whatever was reached; the learning rate falls to 0 until then.
3. ``OUT`` gets ``config.json`` and ``model.safetensors`` (bfloat16) with the published names.
4. Acceptance on answers to prompts whose templates and topics are not in the training text, with
   greedy answers and with answers of temperature 0.8. Draft tokens are the head's most likely
   ones. All starts are computed at once with the tokens of the answer as input. That is exact: a
   draft token counts only if all draft tokens before it equal the answer.

``--text`` keeps the text for further runs. ``--device cpu`` checks only that the script runs.

The head: Li et al., "EAGLE-3: Scaling up Inference Acceleration of Large Language Models via
Training-Time Test", arXiv 2503.01840.
"""

from __future__ import annotations

from benchmarks.gpu import require_gpu

if __name__ == "__main__":
    require_gpu("cpu", hint="; --device cpu checks that the script runs")  # before torch is loaded

import gc
import json
import math
import random
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, pad, scaled_dot_product_attention
from transformers import AutoModelForCausalLM, LlamaConfig
from transformers.models.llama.modeling_llama import (
    LlamaMLP,
    LlamaRMSNorm,
    LlamaRotaryEmbedding,
    apply_rotary_pos_emb,
)

from benchmarks.draft_text import KINDS, TEST_TEMPERATURES, Answer, Text, write_text

_SEED = 5
_ALIGNMENT = 8  # of row lengths, for the mask of memory-efficient attention
_LOG_S = 10.0
_SHARE_FOR_TEST = 0.05  # of the time, at its end
_STEP_DECAY = 0.8  # weight of a draft token's loss, per position

app = typer.Typer(pretty_exceptions_enable=False, help=(__doc__ or "").splitlines()[0])


# The head --------------------------------------------------------------------------------------


class _Layer(nn.Module):
    """A Llama layer whose q, k and v read an embedding beside a hidden state: ``[2H]``."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        hidden, eps, size = config.hidden_size, config.rms_norm_eps, config.head_dim
        num_heads, num_kv_heads = config.num_attention_heads, config.num_key_value_heads
        self.head_dim, self.num_queries_per_kv_head = size, num_heads // num_kv_heads
        self.self_attn = nn.ModuleDict(
            {
                "q_proj": nn.Linear(2 * hidden, num_heads * size, bias=False),
                "k_proj": nn.Linear(2 * hidden, num_kv_heads * size, bias=False),
                "v_proj": nn.Linear(2 * hidden, num_kv_heads * size, bias=False),
                "o_proj": nn.Linear(num_heads * size, hidden, bias=False),
            }
        )
        self.mlp = LlamaMLP(config)
        self.input_layernorm = LlamaRMSNorm(hidden, eps)
        self.hidden_norm = LlamaRMSNorm(hidden, eps)
        self.post_attention_layernorm = LlamaRMSNorm(hidden, eps)

    def forward(
        self, embeds: Tensor, hidden: Tensor, rope: Any, earlier: list[Any], mask: Tensor
    ) -> Tensor:
        """
        Args:
            embeds, hidden: ``[B, T, H]``.
            rope: cosines and sines of the positions.
            earlier: keys and values of the earlier calls, ``[B, heads, T, head_dim]``; those of
                this call are appended.
            mask: bool ``[T, calls * T]``.
        """
        attn = self.self_attn
        x = torch.cat([self.input_layernorm(embeds), self.hidden_norm(hidden)], -1)
        q, k, v = (
            attn[name](x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
            for name in ("q_proj", "k_proj", "v_proj")
        )
        q, k = apply_rotary_pos_emb(q, k, *rope)
        earlier.append([t.repeat_interleave(self.num_queries_per_kv_head, 1) for t in (k, v)])
        keys, values = (torch.cat(tensors, 2) for tensors in zip(*earlier, strict=True))
        out = scaled_dot_product_attention(q.to(v.dtype), keys.to(v.dtype), values, attn_mask=mask)
        hidden = hidden + attn["o_proj"](out.transpose(1, 2).flatten(2))
        return hidden + self.mlp(self.post_attention_layernorm(hidden))


class Eagle3Head(nn.Module):
    """One layer that drafts tokens from hidden states of a target.

    Args:
        config: with ``draft_vocab_size`` and ``target_hidden_size``.
        draft_ids: int64 ``[draft_vocab_size]``, ascending target ids of the reduced vocabulary.
    """

    d2t: Tensor
    t2d: Tensor

    def __init__(self, config: Any, draft_ids: Tensor) -> None:
        super().__init__()
        hidden, num_draft_ids = config.hidden_size, config.draft_vocab_size
        self.fc = nn.Linear(3 * config.target_hidden_size, hidden, bias=False)
        self.midlayer = _Layer(config)
        self.norm = LlamaRMSNorm(hidden, config.rms_norm_eps)
        self.lm_head = nn.Linear(hidden, num_draft_ids, bias=False)
        for name, parameter in self.named_parameters():
            if "norm" not in name:
                nn.init.normal_(parameter, std=0.02)
        is_drafted = torch.zeros(config.vocab_size, dtype=torch.bool)
        is_drafted[draft_ids] = True
        self.register_buffer("d2t", draft_ids - torch.arange(num_draft_ids))
        self.register_buffer("t2d", is_drafted)
        self.config = config
        self._rope = [LlamaRotaryEmbedding(config)]  # a list: no part of the state

    @property
    def draft_ids(self) -> Tensor:
        """int64 ``[draft_vocab_size]``: the target id of each draft id."""
        return self.d2t + torch.arange(len(self.d2t), device=self.d2t.device)

    def forward(self, embeds: Tensor, aux: Tensor, num_drafts: int) -> Iterator[Tensor]:
        """Draft from each start ``s`` of 0 to ``T`` - 1.

        Draft j reads the token at ``s + 1 + j`` and a hidden state: of the target at ``s`` if j is
        0, else the head's own of draft j - 1. It attends to the first inputs of the starts up to
        ``s``, and to the later inputs of its own start.

        Args:
            embeds: ``[B, T, H]``, of the token after each position.
            aux: ``[B, T, 3 * H_target]``, hidden states of the target at each position.

        Yields:
            float ``[B, T, H]`` per draft, the input of ``norm`` and ``lm_head``. The last j rows
            of draft j have no token as input and mean nothing.
        """
        length, device = embeds.shape[1], embeds.device
        own = torch.eye(length, dtype=torch.bool, device=device)
        mask = torch.ones_like(own).tril()
        rope = self._rope[0].to(device)
        earlier: list[Any] = []
        hidden = self.fc(aux)
        for j in range(num_drafts):
            positions = torch.arange(j, j + length, device=device)[None]
            x = pad(embeds[:, j:], (0, 0, 0, j))
            hidden = self.midlayer(x, hidden, rope(hidden, positions), earlier, mask)
            yield hidden
            mask = torch.cat([mask, own], 1)

    def logits(self, hidden: Tensor) -> Tensor:
        """``[..., draft_vocab_size]``."""
        return self.lm_head(self.norm(hidden))

    def save(self, folder: Path) -> None:
        """Write ``config.json`` and ``model.safetensors``, in bfloat16."""
        folder.mkdir(parents=True, exist_ok=True)
        tensors = {
            name: (t.bfloat16() if t.is_floating_point() else t).cpu().contiguous()
            for name, t in self.state_dict().items()
        }
        save_file(tensors, folder / "model.safetensors", {"format": "pt"})
        (folder / "config.json").write_text(json.dumps(self.config.to_dict(), indent=2) + "\n")


def new_head(target: Any, draft_ids: Tensor) -> Eagle3Head:
    """An untrained head. Its norm and its output layer start as the target's, if these fit."""
    config = target.config
    num_layers = config.num_hidden_layers
    taken = {
        name: getattr(config, name)
        for name in (
            "vocab_size",
            "hidden_size",
            "intermediate_size",
            "num_attention_heads",
            "num_key_value_heads",
            "head_dim",
            "max_position_embeddings",
            "rms_norm_eps",
            "rope_parameters",
            "bos_token_id",
            "eos_token_id",
        )
    }
    made: Any = LlamaConfig  # its signature lacks names that it keeps
    own = made(
        **taken,
        num_hidden_layers=1,
        tie_word_embeddings=False,
        architectures=["LlamaForCausalLMEagle3"],
        dtype="bfloat16",
        draft_vocab_size=len(draft_ids),
        target_hidden_size=config.hidden_size,
        eagle_config={
            "eagle_aux_hidden_state_layer_ids": [2, num_layers // 2, num_layers - 3],
            "use_aux_hidden_state": True,
        },
    )
    head = Eagle3Head(own, draft_ids)
    with torch.no_grad():
        head.lm_head.weight.copy_(target.get_output_embeddings().weight[draft_ids])
        head.norm.weight.copy_(target.base_model.norm.weight)
    return head


def frequent_ids(answers: Sequence[Answer], num_ids: int, always: Sequence[int]) -> Tensor:
    """The most frequent ids of the answers, and those that are always in; ascending. Fewer if the
    answers have fewer."""
    counts = Counter(t for a in answers for t in a.token_ids[a.num_prompt_tokens :])
    order = [*always, *(t for t, _ in counts.most_common(num_ids) if t not in always)]
    return torch.tensor(sorted(order[:num_ids]))


# Training --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Batch:
    """Answers, padded on the right.

    Attributes:
        token_ids: int64 ``[B, T + 1]``.
        num_prompt_tokens, num_tokens: int64 ``[B, 1]``.
    """

    token_ids: Tensor
    num_prompt_tokens: Tensor
    num_tokens: Tensor

    @classmethod
    def of(cls, answers: Sequence[Answer], device: str) -> Batch:
        longest = max(len(a.token_ids) for a in answers)
        width = math.ceil((longest - 1) / _ALIGNMENT) * _ALIGNMENT + 1
        rows = [a.token_ids + [0] * (width - len(a.token_ids)) for a in answers]
        sizes = torch.tensor([[a.num_prompt_tokens, len(a.token_ids)] for a in answers])
        return cls(torch.tensor(rows).to(device), sizes[:, :1].to(device), sizes[:, 1:].to(device))

    def is_drafted(self, draft: int) -> Tensor:
        """bool ``[B, T]``: the starts whose draft token of this index, from 0, is in the answer.
        The first start is the one whose input is the first token of the answer."""
        starts = torch.arange(self.token_ids.shape[1] - 1, device=self.token_ids.device)
        is_begun = starts >= self.num_prompt_tokens - 1
        return is_begun & (starts + 2 + draft < self.num_tokens)

    def drafted_tokens(self, draft: int) -> Tensor:
        """int64 ``[B, T]``: the token at the place of each start's draft token."""
        return pad(self.token_ids[:, 2 + draft :], (0, 1 + draft))


def batches(
    answers: Sequence[Answer], num_tokens: int, device: str, rng: random.Random | None
) -> Iterator[Batch]:
    """Answers of similar lengths together.

    Args:
        num_tokens: most tokens of a batch, padding included; a longer answer is a batch.
        rng: for another order and other batches each time; None: always the same.
    """
    jitter = [rng.random() if rng else 0.0 for _ in answers]
    order = sorted(range(len(answers)), key=lambda i: len(answers[i].token_ids) + 16 * jitter[i])
    groups: list[list[Answer]] = [[]]
    longest = 0
    for i in order:
        answer = answers[i]
        longest = max(longest, len(answer.token_ids) + _ALIGNMENT)
        if groups[-1] and longest * (len(groups[-1]) + 1) > num_tokens:
            groups.append([])
            longest = len(answer.token_ids) + _ALIGNMENT
        groups[-1].append(answer)
    if rng:
        rng.shuffle(groups)
    return (Batch.of(group, device) for group in groups if group)


def _precision(device: str) -> Any:
    return torch.autocast(device, torch.bfloat16) if device == "cuda" else nullcontext()


class Trainer:
    """Trains a head.

    Args:
        target: the model, without gradients.
        num_drafts: draft tokens per start.
        rate: the highest learning rate.
    """

    def __init__(self, target: Any, head: Eagle3Head, num_drafts: int, rate: float) -> None:
        self.target, self.head, self.num_drafts, self.rate = target, head, num_drafts, rate
        self.device = str(target.device.type)
        self._layers = head.config.eagle_config["eagle_aux_hidden_state_layer_ids"]
        self._num_steps = 0
        self._optimizer = torch.optim.AdamW(
            head.parameters(), rate, betas=(0.9, 0.95), weight_decay=0.0
        )

    @torch.no_grad()
    def read(self, batch: Batch) -> tuple[Tensor, Tensor, Tensor]:
        """The target's values at all positions but the last: embeddings of the tokens after them
        ``[B, T, H]``, hidden states ``[B, T, 3H]`` and logits ``[B, T, V]``."""
        out = self.target(batch.token_ids, output_hidden_states=True, use_cache=False)
        embeds = self.target.get_input_embeddings()(batch.token_ids[:, 1:])
        aux = torch.cat([out.hidden_states[layer] for layer in self._layers], -1)
        return embeds, aux[:, :-1], out.logits[:, :-1]

    def step(self, batch: Batch, time_share: float) -> Tensor:
        """One step of the optimizer.

        Args:
            time_share: passed time of the training, 0 to 1, for the learning rate.

        Returns:
            The cross entropy of each draft index, float ``[num_drafts]`` on the device.
        """
        embeds, aux, logits = self.read(batch)
        is_known = self.head.t2d[logits.argmax(-1)]
        wanted = logits[..., self.head.draft_ids].float().softmax(-1)
        losses = []
        with _precision(self.device):
            for j, hidden in enumerate(self.head(embeds, aux, self.num_drafts)):
                later = pad(is_known[:, 1 + j :], (0, 1 + j))
                rows = (batch.is_drafted(j) & later).nonzero(as_tuple=True)
                found = self.head.logits(hidden[rows]).float()
                losses.append(cross_entropy(found, wanted[rows[0], rows[1] + 1 + j]))
        weighted = [loss * _STEP_DECAY**j for j, loss in enumerate(losses) if loss.isfinite()]
        self._num_steps += 1
        for group in self._optimizer.param_groups:
            warm_up = min(1.0, self._num_steps / 100)
            group["lr"] = self.rate * warm_up * (1 + math.cos(math.pi * min(1.0, time_share))) / 2
        self._optimizer.zero_grad(set_to_none=True)
        if weighted:  # none if all answers have one token
            torch.stack(weighted).sum().backward()
            nn.utils.clip_grad_norm_(self.head.parameters(), 1.0)
            self._optimizer.step()
        return torch.stack(losses).detach()

    def train(self, answers: Sequence[Answer], num_tokens: int, until: float) -> int:
        """Train until the time, at least one step. Prints the losses.

        Args:
            num_tokens: per batch.
            until: by ``time.perf_counter``.

        Returns:
            The number of steps.
        """
        rng, begin = random.Random(_SEED), time.perf_counter()
        printed, num_seen, num_epochs = begin, 0, 0
        while True:
            for batch in batches(answers, num_tokens, self.device, rng):
                now = time.perf_counter()
                losses = self.step(batch, (now - begin) / max(until - begin, 1e-9))
                num_seen += batch.token_ids.numel()
                now = time.perf_counter()
                if self._num_steps == 1 or now - printed > _LOG_S or now >= until:
                    shown = " ".join(f"{loss:.3f}" for loss in losses.tolist())
                    print(
                        f"{now - begin:6.1f} s, step {self._num_steps}, epoch {num_epochs}, "
                        f"{num_seen / 1e6:.1f} M tokens: cross entropy {shown}",
                        flush=True,
                    )
                    printed = now
                if now >= until:
                    return self._num_steps
            num_epochs += 1


# Test ------------------------------------------------------------------------------------------


@torch.no_grad()
def num_accepted(trainer: Trainer, batch: Batch) -> list[list[int]]:
    """Per answer and start, the number of draft tokens before the first that differs from the
    answer. The starts of an answer are those of :meth:`Batch.is_drafted` for the first draft."""
    head = trainer.head
    embeds, aux, _ = trainer.read(batch)
    is_equal = torch.ones_like(batch.is_drafted(0))
    counts = torch.zeros_like(batch.token_ids[:, 1:])
    with _precision(trainer.device):
        for j, hidden in enumerate(head(embeds, aux, trainer.num_drafts)):
            drafts = head.draft_ids[head.logits(hidden).argmax(-1)]
            is_equal &= batch.is_drafted(j) & (drafts == batch.drafted_tokens(j))
            counts += is_equal
    return [row[starts].tolist() for row, starts in zip(counts, batch.is_drafted(0), strict=True)]


def acceptance(counts: Sequence[Sequence[int]], num_drafts: int) -> list[float | None]:
    """Per draft index, the share of accepted draft tokens among those whose predecessors were
    accepted and whose place is in the answer."""
    shares: list[float | None] = []
    for j in range(num_drafts):
        tried = [c[s] > j for c in counts for s in range(len(c) - j) if c[s] >= j]
        shares.append(sum(tried) / len(tried) if tried else None)
    return shares


def tokens_per_step(counts: Sequence[Sequence[int]], num_drafts: int) -> float | None:
    """Tokens of the answers after their first, per step with so many draft tokens: each step
    begins where the one before it ended."""
    num_steps = 0
    for of_answer in counts:
        start = 0
        while start < len(of_answer):
            start += min(of_answer[start], num_drafts) + 1
            num_steps += 1
    return sum(map(len, counts)) / num_steps if num_steps else None


def measure(trainer: Trainer, answers: Sequence[Answer], num_tokens: int) -> list[dict[str, Any]]:
    """A line of the table per temperature and kind, and for all kinds."""
    lines = []
    for temperature in TEST_TEMPERATURES:
        every: list[list[int]] = []
        for kind in (*KINDS, "all"):
            chosen = [a for a in answers if (a.kind, a.temperature) == (kind, temperature)]
            counts = [
                row
                for batch in (batches(chosen, num_tokens, trainer.device, None) if chosen else ())
                for row in num_accepted(trainer, batch)
            ]
            every += counts
            counts = every if kind == "all" else counts
            lines.append(
                {
                    "temperature": temperature,
                    "kind": kind,
                    "answers": len(counts),
                    "tokens": sum(map(len, counts)),
                    "acceptance": acceptance(counts, trainer.num_drafts),
                    "tokens_per_step": [
                        tokens_per_step(counts, k + 1) for k in range(trainer.num_drafts)
                    ],
                }
            )
    return lines


def table(lines: Sequence[dict[str, Any]]) -> str:
    """The lines in Markdown."""
    indices = range(1, len(lines[0]["acceptance"]) + 1)
    names = ["temperature", "kind", "tokens", *(f"accepted, draft {k}" for k in indices)]
    names += [f"tokens per step, k = {k}" for k in indices]
    rows = [names, ["---"] * len(names)]
    for line in lines:
        shares = ["-" if a is None else f"{a:.0%}" for a in line["acceptance"]]
        rates = ["-" if r is None else f"{r:.2f}" for r in line["tokens_per_step"]]
        rows.append([str(line["temperature"]), line["kind"], str(line["tokens"]), *shares, *rates])
    return "\n".join("| " + " | ".join(row) + " |" for row in rows)


# The command -----------------------------------------------------------------------------------


def _text(file: Path | None, folder: str, device: str, sizes: tuple[float, int, int, int]) -> Text:
    if file is not None and file.exists():
        read = json.loads(file.read_text())
        return Text(*([Answer(**a) for a in read[part]] for part in ("training", "test")))
    from pagespec import LLM

    settings: dict[str, Any] = {"max_model_len": 1024}
    if device == "cuda":  # the rest of the memory is for the training
        settings |= {"dtype": "bfloat16", "max_num_seqs": 512, "gpu_memory_utilization": 0.3}
    llm = LLM(folder, device=device, **settings)
    text = write_text(llm, *sizes)
    del llm
    gc.collect()
    if device == "cuda":
        torch.cuda.empty_cache()
    if file is not None:
        file.write_text(json.dumps(asdict(text)))
    return text


@app.command()
def main(
    model: Annotated[Path, typer.Argument(help="A folder or a .gguf file.")],
    out: Annotated[Path, typer.Argument(help="The folder of the head.")],
    minutes: Annotated[float, typer.Option(help="For all, from here on.")] = 8.0,
    text_minutes: Annotated[float, typer.Option(help="For writing the text.")] = 2.0,
    text: Annotated[Path | None, typer.Option(help="Written; read if it exists.")] = None,
    draft_vocab_size: Annotated[int, typer.Option(min=1)] = 8192,
    num_drafts: Annotated[int, typer.Option(min=1, help="Unrolled draft tokens.")] = 5,
    batch_tokens: Annotated[int, typer.Option(min=1, help="Per training step.")] = 16384,
    rate: Annotated[float, typer.Option(help="The highest learning rate.")] = 1e-3,
    prompts_per_round: Annotated[int, typer.Option(min=1)] = 2048,
    test_prompts: Annotated[int, typer.Option(min=1, help="Per kind.")] = 48,
    max_tokens: Annotated[int, typer.Option(min=2, help="Of an answer.")] = 320,
    device: str = "cuda",
) -> None:
    """Train a head, save it, and print its acceptance."""
    from pagespec.compile.load.source import find_source

    begin = time.perf_counter()
    torch.manual_seed(_SEED)
    folder = find_source(model).files
    sizes = (60 * text_minutes, prompts_per_round, test_prompts, max_tokens)
    written = _text(text, folder, device, sizes)
    print(
        f"{time.perf_counter() - begin:.1f} s: {len(written.training)} answers, "
        f"{written.num_tokens} tokens; test: {len(written.test)} answers",
        flush=True,
    )
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    target: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
    target.to(device).eval()
    target.requires_grad_(False)
    ends = target.config.eos_token_id
    always = [e for e in (ends if isinstance(ends, list) else [ends]) if e is not None]
    draft_ids = frequent_ids(written.training, draft_vocab_size, always)
    head = new_head(target, draft_ids).to(device)
    trainer = Trainer(target, head, num_drafts, rate)
    until = begin + 60 * minutes * (1 - _SHARE_FOR_TEST)
    num_steps = trainer.train(written.training, batch_tokens, until)
    head.save(out)
    lines = measure(trainer, written.test, batch_tokens)
    shown = {
        "model": model.name,
        "device": torch.cuda.get_device_name() if device == "cuda" else "cpu",
        "torch": torch.__version__,
        "num_training_tokens": written.num_tokens,
        "num_steps": num_steps,
        "seconds": time.perf_counter() - begin,
        "lines": lines,
    }
    (out / "acceptance.json").write_text(json.dumps(shown, indent=2) + "\n")
    print(table(lines))
    print(f"{num_steps} steps, {shown['seconds']:.1f} s in all: {out}")


if __name__ == "__main__":
    app()
