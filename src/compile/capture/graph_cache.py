"""The on-disk cache of traced graphs: a model that was traced once starts without Dynamo.

One file a graph, named by all that the graph depends on (:mod:`.graph_key`): JSON
behind a line with its digest. It holds no code. But it says which functions are called on which
tensors, so a file is read only if it belongs to this user and nobody else may write to it.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import stat
from collections.abc import Callable, Sequence
from pathlib import Path

from ...disk_cache import write_whole
from ...kernels.attention.spec import AttentionSpec
from ..model.load import LoadedModel
from .dynamo import Traced, trace
from .few_layers import trace_layers
from .graph_json import NotSerializable, decode, encode
from .graph_key import graph_key, named_tensors

logger = logging.getLogger("pagespec")

_WRITABLE_BY_OTHERS = stat.S_IWGRP | stat.S_IWOTH


class GraphCache:
    """The graphs in ``folder``, which need not be there yet.

    For models that nothing else holds: a module that was changed by its owner can compute anything.

    Args:
        before_trace: called before a model is traced, which takes seconds.
    """

    def __init__(self, folder: Path, before_trace: Callable[[], None] | None = None) -> None:
        self._folder = folder
        self._before_trace = before_trace

    def get(self, loaded: LoadedModel, specs: Sequence[AttentionSpec]) -> tuple[Traced, bool]:
        """The graph of this model, and whether it was traced now.

        Raises:
            UnsupportedModelError: it was not there, and ``forward`` does not trace into one graph.
        """
        # Before tracing, which leaves its traces in Dynamo's settings.
        key = graph_key(loaded, specs)
        if key is not None and (kept := self._load(key, loaded)) is not None:
            return kept, False
        if self._before_trace is not None:
            self._before_trace()
        traced = trace_layers(loaded, specs) or trace(loaded, specs)
        if key is not None:
            self._save(key, loaded, traced)
        return traced, True

    def _load(self, key: str, loaded: LoadedModel) -> Traced | None:
        file = self._folder / f"{key}.json"
        try:
            digest, _, body = _read(file).partition(b"\n")
            if hashlib.sha256(key.encode() + body).hexdigest().encode() != digest:
                raise ValueError("it is damaged")
            return decode(json.loads(body), dict(named_tensors(loaded.module)))
        except FileNotFoundError:
            return None
        # Whatever is wrong with the file or this torch, tracing will do.
        except Exception as error:
            logger.info("cached graph %s is not used: %s", file, error)
            return None

    def _save(self, key: str, loaded: LoadedModel, traced: Traced) -> None:
        """Keep a graph that no pass has touched. What cannot be kept costs only the cache."""
        names: dict[int, str] = {}
        for name, tensor in named_tensors(loaded.module):
            names.setdefault(id(tensor), name)
        try:
            body = json.dumps(encode(traced, names), separators=(",", ":")).encode()
        except NotSerializable as error:
            logger.info("the graph of %s is not kept: %s", loaded.architecture, error)
            return
        digest = hashlib.sha256(key.encode() + body).hexdigest().encode()
        try:
            write_whole(self._folder / f"{key}.json", digest + b"\n" + body)
        except OSError as error:
            logger.info("the graph of %s is not kept: %s", loaded.architecture, error)


def _read(file: Path) -> bytes:
    """Raises PermissionError if another user could have written the file, or OSError."""
    with file.open("rb") as opened:
        status = os.fstat(opened.fileno())
        is_ours = not hasattr(os, "getuid") or status.st_uid == os.getuid()
        if not is_ours or status.st_mode & _WRITABLE_BY_OTHERS:
            raise PermissionError("another user may write to it")
        return opened.read()
