"""Offline examples of vLLM, with the import line and the model changed.

``python -m peer_harness.examples FILE ARGUMENTS`` runs one in this process.
"""

from __future__ import annotations

import json
import re
import runpy
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from . import models, run

_LIMIT_S = 300
_GREEDY = ("--max-tokens", "16", "--max-model-len", "1024")
# --test wants EAGLE and a data set of the hub.
_DRAFTS = (
    *("--method", "ngram", "--enable-chunked-prefill", "--max-model-len", "1024"),
    *("--num-prompts", "2", "--random-input-len", "16", "--output-len", "48"),
)

# Each with the arguments that keep it short.
ARGUMENTS: Mapping[str, tuple[str, ...]] = {
    "basic/offline_inference/basic.py": (),
    "basic/offline_inference/generate.py": _GREEDY,
    "basic/offline_inference/chat.py": _GREEDY,
    "basic/offline_inference/classify.py": (),
    "basic/offline_inference/embed.py": (),
    "basic/offline_inference/score.py": (),
    "deployment/async_llm_streaming.py": (),
    "deployment/llm_engine_example.py": (),
    "features/automatic_prefix_caching/automatic_prefix_caching_offline.py": (),
    "features/automatic_prefix_caching/prefix_caching_offline.py": (),
    "features/batch_invariance/reproducibility_offline.py": (),
    "features/context_extension/context_extension_offline.py": (),
    "features/logits_processor/custom.py": (),
    "features/logits_processor/custom_req.py": (),
    "features/logits_processor/custom_req_init.py": (),
    "features/lora/multilora_offline.py": (),
    "features/pause_resume/pause_resume_offline.py": (),
    "features/profiling/run_one_batch_offline.py": ("--max-model-len", "1024"),
    "features/profiling/simple_profiling_offline.py": (),
    "features/prompt_embed/prompt_embed_offline.py": (),
    "features/reset_kv/reset_kv_offline.py": (),
    "features/speculative_decoding/spec_decode_offline.py": _DRAFTS,
    "features/structured_outputs/structured_outputs_offline.py": (),
    "observability/metrics/offline.py": (),
    "generate/multimodal/vision_language_offline.py": (),
    "tool_calling/chat_with_tools_offline.py": (),
}
_POOLING = "embeddings, classification and pooling are not supported"
# Those that need a feature which pagespec does not have: the feature, and words of the refusal.
REFUSED: Mapping[str, tuple[str, str]] = {
    "basic/offline_inference/classify.py": ("classification", _POOLING),
    "basic/offline_inference/embed.py": ("embeddings", _POOLING),
    "basic/offline_inference/score.py": ("classification", _POOLING),
    "features/context_extension/context_extension_offline.py": (
        "changes of a config",
        "change config.json in a copy of the folder",
    ),
    "features/lora/multilora_offline.py": ("LoRA", "LoRA adapters are not supported"),
    "features/profiling/simple_profiling_offline.py": (
        "profiler",
        "use torch.profiler around the call",
    ),
    "features/prompt_embed/prompt_embed_offline.py": (
        "embeddings",
        "prompts are texts or token ids, not embeddings",
    ),
    "generate/multimodal/vision_language_offline.py": (
        "images and audio",
        "images, audio and video are not supported",
    ),
    "tool_calling/chat_with_tools_offline.py": (
        "tokenizers of mistral_common",
        "tokenizers are read by transformers",
    ),
}
OFFLINE = tuple(f"examples/{name}" for name in ARGUMENTS)


def run_example(stage: Path, name: str, records: Path) -> list[Mapping[str, Any]]:
    """Run one example in a process of its own.

    Returns:
        A record of one entry, as :mod:`.plugin` describes it.
    """
    record = run.record_of(records, name)
    log = record.with_suffix(".log")
    arguments = ARGUMENTS.get(name.removeprefix("examples/"), ())
    command = [sys.executable, "-m", "peer_harness.examples", name, *arguments]
    begin = time.monotonic()
    code = run.run_to_end(command, stage, log, _LIMIT_S)
    lines = log.read_text(errors="replace").strip().splitlines()
    reason = " ".join(lines[-1:])[:300]
    if code is None:
        reason = f"did not end in {_LIMIT_S} s"
    entry = {
        "id": name,
        "outcome": "passed" if code == 0 else "failed",
        "reason": "" if code == 0 else reason,
        "seconds": round(time.monotonic() - begin, 2),
    }
    record.write_text(json.dumps(entry) + "\n")
    return [entry]


def main() -> None:
    """Run the example with ``vllm`` replaced by ``pagespec`` in its import lines."""
    path = Path(sys.argv[1])
    text = re.sub(r"(?m)^(\s*(?:from|import) )vllm\b", r"\1pagespec", path.read_text())
    models.replace_models()
    with tempfile.TemporaryDirectory() as folder:
        changed = Path(folder) / path.name
        changed.write_text(text)
        sys.argv = sys.argv[1:]
        runpy.run_path(str(changed), run_name="__main__")


if __name__ == "__main__":
    main()
