"""The generated parts of reference pages are current."""

from __future__ import annotations

import pytest

from tests.support.reference_docs.pages import DOCS, PAGES, made


@pytest.mark.parametrize("name", PAGES)
def test_a_page_is_current(name: str) -> None:
    text = (DOCS / name).read_text(encoding="utf-8")
    assert made(name) == text, "python -m tests.support.reference_docs writes it"


def test_pages_have_what_they_list() -> None:
    """A generator that finds nothing would be current, too."""
    rows = {
        "engine_arguments.md": ("| `max_num_seqs` | int | `64` |",),
        "from_vllm.md": (
            "| `data_parallel_size` |",
            "| `allowed_origins` |",
            "| `lora_request` |",
            "| `AsyncLLM.sleep` |",
            "| `PoolingParams` |",
            "| `pagespec.v1.engine.async_llm` | `AsyncLLM` |",
        ),
        "cli.md": (
            "## pagespec trace check",
            "| `--max-num-seqs N` | `64` |",
            "`--drain-timeout S`",
        ),
        "http_reference.md": ("| POST | `/v1/chat/completions` | yes |", "| `top_p` | number |"),
        "metrics.md": (
            "| `vllm:num_preemptions_total` | counter |",
            "| `pagespec:engine_up` | gauge |",
        ),
    }
    for name, parts in rows.items():
        text = (DOCS / name).read_text(encoding="utf-8")
        for part in parts:
            assert part in text, f"{name} lacks {part}"
