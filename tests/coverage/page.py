"""Writes docs/models.md from what a sweep found."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

from tests.coverage.entry import Entry
from tests.coverage.sweep import SECONDS_AN_ENTRY, Sweep

PAGE = Path(__file__).parents[2] / "docs/models.md"
# What a reason says, and the class of reasons it belongs to.
_CLASSES = (
    ("attention calls through AttentionInterface", "Layers that are no attention"),
    ("tokens mix outside attention", "Tokens mix outside attention"),
    (
        "does not take its attention function",
        "Attention written out in another form than a masked softmax",
    ),
    ("attention without a mask", "Attention that is not causal"),
    ("needs a package", "A package that is not installed"),
    ("takes the tensor", "Attention with a tensor of its own"),
    ("its cache holds", "A cache with a window that the masks have not"),
    ("mask is neither", "Masks that are neither causal nor a window or chunk"),
    ("a bias or a mask of its own", "A mask or bias of the layer's own"),
    ("attention over shapes", "Attention over other tokens than those of the pass"),
    ("its forward takes no", "Positions cannot be told"),
    ("not one graph", "Code that does not trace into one graph"),
    ("forward pass fails", "The forward pass fails on packed tokens"),
    ("encoder-decoder", "Encoder-decoder models"),
)


def page_of(sweep: Sweep, beside: Sweep | None = None) -> str:
    counts = Counter(entry.outcome for entry in sweep.entries)
    words = ", ".join(f"{counts[name]} {name}" for name in ("equal", "refused", "not built"))
    bad = counts["wrong"] + counts["failed"]
    parts = [
        "# Which models are served\n",
        f"Of the {len(sweep.entries)} causal language models that transformers "
        f"{sweep.transformers} has: **{words}, {counts['wrong']} wrong, {counts['failed']} "
        f"failed**. Found on {sweep.date} with torch {sweep.torch}, in {sweep.seconds / 60:.0f} "
        f"minutes on {sweep.num_processes} processes. `nox -s coverage -- --write` writes this "
        "page.\n",
        _METHOD,
        "## Equal\n",
        _table(["name", "class", "notes", "longest prompt"], map(_row, _of(sweep, "equal"))),
        "## Refused\n",
        "Nothing is served that the probe does not understand: a model here raises "
        "`UnsupportedModelError` or `InvalidInputError` before the first token, with the reason.\n",
        *_refused(_of(sweep, "refused")),
        "## Not built\n",
        "No tiny model could be made by rules that look at a config's field names alone, so the "
        "sweep says nothing about these.\n",
        _list(_of(sweep, "not built")),
    ]
    if bad:
        parts += ["## Wrong or failed\n", _list(_of(sweep, "wrong") + _of(sweep, "failed"))]
    if beside:
        parts += [f"## With transformers {beside.transformers}\n", _differences(sweep, beside)]
    return "\n".join(parts)


_METHOD = f"""Each is built from its default config with every size shrunk, with random weights, in
float32, and run on a CPU in a process of its own, which has {SECONDS_AN_ENTRY} s. "Equal" means:
every token is the one that transformers' own greedy `generate` chooses, and logits are within 1e-4
of its largest,

- with a budget of 24 tokens a step, a pool so small that requests are preempted, and every prompt
  again with its prefix cached;
- with prompts one token longer than each integer of the config that a context can reach (windows,
  chunks, original contexts, sizes), in one pass;
- with these in chunks of 60 tokens, and again with cached prefixes.

Windows and chunks are shrunk to 24 tokens, so that prompts pass them. What this does not show:
other settings of a config than its defaults, weights that were trained, other dtypes, GPUs.

Models with an indexer ([attention.md](attention.md#keys-that-an-indexer-chooses)) have 16 index
heads here. With few heads many scores are 0, and which of equal scores transformers takes on a CPU
depends on the length of the prompt.
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
        # The class stands in front of most reasons.
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
    lines = [f"Of its {len(theirs)}: {words} ({beside.date}, torch {beside.torch}).\n"]
    for name in sorted(ours.keys() | theirs.keys()):
        here, there = ours.get(name), theirs.get(name)
        if here is None or there is None:
            entry = there if here is None else here
            where = beside.transformers if here is None else sweep.transformers
            reason = f": {_escaped(entry.reason)}" if entry.reason else ""
            lines.append(f"- `{name}` is in {where} only, {entry.outcome}{reason}")
        elif here.outcome != there.outcome:
            lines.append(
                f"- `{name}` is {there.outcome} there, {here.outcome} here: "
                f"{_escaped(there.reason or here.reason)}"
            )
    return "\n".join(lines) + "\n"
