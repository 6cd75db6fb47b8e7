"""The on-disk cache of traced graphs: a model that was traced once starts without Dynamo.

One file a graph (:mod:`.graph_file`), named by all that the graph depends on (:mod:`.graph_key`).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from pathlib import Path

from ...kernels.attention.spec import AttentionSpec
from ..model.loaded import LoadedModel, named_tensors
from ..step_fields import FIELDS, Field
from .dynamo import trace
from .few_layers import trace_layers
from .graph_file import read_graph, write_graph
from .graph_json import NotSerializable
from .graph_key import graph_key
from .traced import Traced

logger = logging.getLogger("pagespec")


class GraphCache:
    """The graphs in ``folder``, which need not be there yet.

    For models that nothing else holds: a module that was changed by its owner can compute anything.

    Args:
        before_trace: called before a model is traced, which takes seconds.

    Attributes:
        key: of the graph that was asked for last; None if it is not kept.
    """

    def __init__(self, folder: Path, before_trace: Callable[[], None] | None = None) -> None:
        self.folder = folder
        self.key: str | None = None
        self._before_trace = before_trace

    def get(
        self, loaded: LoadedModel, specs: Sequence[AttentionSpec], fields: Sequence[Field] = FIELDS
    ) -> tuple[Traced, bool]:
        """The graph of this model for steps of these fields, and whether it was traced now.

        Raises:
            UnsupportedModelError: it was not there, and ``forward`` does not trace into one graph.
        """
        # Before tracing, which leaves its traces in Dynamo's settings.
        key = graph_key(loaded, specs, fields)
        if key is not None and (kept := self._load(key, loaded)) is not None:
            self.key = key
            return kept, False
        if self._before_trace is not None:
            self._before_trace()
        traced = trace_layers(loaded, specs, fields) or trace(loaded, specs, fields)
        if key is not None and self._save(key, loaded, traced):
            self.key = key
        return traced, True

    def _load(self, key: str, loaded: LoadedModel) -> Traced | None:
        try:
            return read_graph(self.folder, key, dict(named_tensors(loaded.module)))
        except FileNotFoundError:
            return None
        # Whatever is wrong with the file or this torch, tracing will do.
        except Exception as error:
            logger.info("cached graph %s is not used: %s", key, error)
            return None

    def _save(self, key: str, loaded: LoadedModel, traced: Traced) -> bool:
        """Keep a graph that no pass has touched. What cannot be kept costs only the cache."""
        try:
            write_graph(self.folder, key, traced, named_tensors(loaded.module))
        except (NotSerializable, OSError) as error:
            logger.info("the graph of %s is not kept: %s", loaded.architecture, error)
            return False
        return True
