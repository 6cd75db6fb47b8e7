"""Writes docs/models.md from the results of a sweep."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

from tests.coverage.entry import Entry
from tests.coverage.sweep import SECONDS_AN_ENTRY, Sweep

PAGE = Path(__file__).parents[2] / "docs/models.md"
# Part of a reason, and the class of reasons with that part.
_CLASSES = (
    ("attention calls through AttentionInterface", "Layers without attention"),
    ("tokens mix outside attention", "Tokens mix outside attention"),
    (
        "does not take its attention function",
        "Hand-written attention that is not a plain masked softmax",
    ),
    ("attention without a mask", "Attention that is not causal"),
    ("needs a package", "Missing packages"),
    ("takes the tensor", "Attention with an extra input tensor"),
    ("its cache holds", "A cache window that the masks do not have"),
    ("mask is neither", "Masks that are neither causal nor a window or chunk"),
    ("a bias or a mask of its own", "A mask or bias that the layer adds itself"),
    ("attention over shapes", "Attention over tokens outside the forward pass"),
    ("its forward takes no", "Positions that cannot be passed"),
    ("not one graph", "Code that does not trace into one graph"),
    ("forward pass fails", "The forward pass fails on packed tokens"),
    ("encoder-decoder", "Encoder-decoder models"),
)


def page_of(sweep: Sweep, beside: Sweep | None = None) -> str:
    counts = Counter(entry.outcome for entry in sweep.entries)
    words = ", ".join(f"{counts[name]} {name}" for name in ("equal", "refused", "not built"))
    bad = counts["wrong"] + counts["failed"]
    parts = [
        "# Supported models\n",
        _PURPOSE,
        f"Of the {len(sweep.entries)} causal language models in transformers "
        f"{sweep.transformers}: **{words}, {counts['wrong']} wrong, {counts['failed']} "
        f"failed** ({sweep.date}, torch {sweep.torch}, {sweep.seconds / 60:.0f} minutes on "
        f"{sweep.num_processes} processes). This command repeats the sweep and writes this "
        "page:\n",
        "<!-- needs: hub, time: 15 minutes -->\n```bash\nnox -s coverage -- --write\n```\n",
        _METHOD,
        "## Equal\n",
        _table(["name", "class", "features", "longest prompt"], map(_row, _of(sweep, "equal"))),
        "## Refused\n",
        "pagespec serves only models that the probe fully recognises. A model of this list raises "
        "`UnsupportedModelError` or `InvalidInputError` with the reason, before the first "
        "token.\n",
        *_refused(_of(sweep, "refused")),
        "## Not built\n",
        "The sweep shrinks a config by the names of its fields alone. These configs do not build "
        "after that, so the sweep makes no statement about their models.\n",
        _list(_of(sweep, "not built")),
    ]
    if bad:
        parts += ["## Wrong or failed\n", _list(_of(sweep, "wrong") + _of(sweep, "failed"))]
    if beside:
        parts += [f"## With transformers {beside.transformers}\n", _differences(sweep, beside)]
    return "\n".join(parts)


_PURPOSE = """This page lists the transformers architectures that pagespec serves with the tokens of
Hugging Face `generate`, and the reason for each refusal. Use it to check whether a model runs.
"""

_METHOD = f"""## Method

Each model is built from its default config with every size reduced and with random weights. It runs
in float32 on a CPU, in its own process with a limit of {SECONDS_AN_ENTRY} s. "Equal" means two
things: every token is the one that transformers' own greedy `generate` chooses, and logits are
within 1e-4 of the largest logit. Each model runs under three conditions:

- a budget of 24 tokens per step and a pool so small that requests are preempted; every prompt runs
  again with its prefix cached;
- prompts one token longer than each integer of the config that a context can reach (windows,
  chunks, original contexts, sizes), in one pass;
- the same prompts in chunks of 60 tokens, and again with cached prefixes.

Windows and chunks are reduced to 24 tokens, so that prompts exceed them. Models with an indexer
([attention.md](attention.md#keys-that-an-indexer-chooses)) have 16 index heads: with few heads many
scores are 0, and the length of the prompt then decides which of equal scores transformers selects
on a CPU.

## Limits of the method

The sweep does not cover non-default settings of a config, trained weights, other dtypes or GPUs.
Known differences:

* **Clamped time steps (Mamba-2).** With an effective `time_step_limit`, pagespec clamps at every
  token, like transformers' forward pass without a cache. The one-token step with a cache, which
  `generate` uses, does not clamp and can therefore choose other tokens. `generate(use_cache=False)`
  chooses those of pagespec. `nemotron_h` and `zamba2` have a lower limit, which matters only where
  softplus(dt) is below `time_step_min`.
* **Windows and chunks of exactly 1 token.** transformers' sliding cache differs from its own
  forward pass without a cache. pagespec equals the forward pass.
* **`dory`.** pagespec supports `recurrent_kv_cache_mode` "per_loop", the default, which caches the
  keys of each loop. It refuses "last_loop", under which the result of `generate` depends on how the
  prompt was chunked.
"""


def _of(sweep: Sweep, outcome: str) -> list[Entry]:
    found = [entry for entry in sweep.entries if entry.outcome == outcome]
    return sorted(found, key=lambda entry: entry.model_type)


def _row(entry: Entry) -> list[str]:
    return [
        f"`{entry.model_type}`",
        f"`{entry.architecture}`",
        entry.notes,
        str(entry.longest),
    ]


def _table(head: list[str], rows: object) -> str:
    lines = ["| " + " | ".join(row) + " |" for row in [head, ["---"] * len(head), *rows]]  # type: ignore[misc]
    return "\n".join(lines) + "\n"


def class_of(reason: str) -> str:
    return next((name for text, name in _CLASSES if text in reason), "Other reasons")


def _refused(entries: list[Entry]) -> list[str]:
    classes = Counter(class_of(entry.reason) for entry in entries)
    parts = []
    for name, count in sorted(classes.items(), key=lambda item: (-item[1], item[0])):
        parts.append(f"### {name}: {count}\n")
        parts.append(_list([entry for entry in entries if class_of(entry.reason) == name]))
    return parts


def _list(entries: list[Entry]) -> str:
    lines = []
    for entry in entries:
        # Most reasons begin with the class.
        reason = re.sub(rf"^{entry.architecture}: ", "", entry.reason) if entry.architecture else ""
        lines.append(f"- `{entry.model_type}`: {_escaped(reason or entry.reason)}")
    return "\n".join(lines) + "\n" if lines else "None.\n"


def _escaped(text: str) -> str:
    return text.replace("<", "&lt;").replace("_", "\\_").replace("*", "\\*")


def _differences(sweep: Sweep, beside: Sweep) -> str:
    counts = Counter(entry.outcome for entry in beside.entries)
    words = ", ".join(f"{n} {name}" for name, n in counts.most_common())
    ours = {entry.model_type: entry for entry in sweep.entries}
    theirs = {entry.model_type: entry for entry in beside.entries}
    lines = [
        f"Of the {len(theirs)} models of that version: {words} ({beside.date}, torch "
        f"{beside.torch}). Differences from {sweep.transformers}:\n"
    ]
    for name in sorted(ours.keys() | theirs.keys()):
        here, there = ours.get(name), theirs.get(name)
        if here is None or there is None:
            entry = there if here is None else here
            where = beside.transformers if here is None else sweep.transformers
            reason = f": {_escaped(entry.reason)}" if entry.reason else ""
            lines.append(f"- `{name}`: only in {where}, {entry.outcome}{reason}")
        elif here.outcome != there.outcome:
            lines.append(
                f"- `{name}`: {there.outcome} with {beside.transformers}, {here.outcome} with "
                f"{sweep.transformers}: {_escaped(there.reason or here.reason)}"
            )
    return "\n".join(lines) + "\n"
