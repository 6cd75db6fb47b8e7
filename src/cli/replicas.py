"""``pagespec generate --replicas``: answers lines with engines on a Ray cluster."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from ..distributed.replicas import ReplicaPool, import_ray
from ..errors import InvalidInputError
from . import make_llm
from .answer_lines import answer_lines, error_row
from .command import note
from .jsonl import Fingerprint, Line, Row
from .options import EngineOptions

_NUM_CHUNKS = 8
"""Number of chunks that a replica answers concurrently, to keep its steps full."""


@contextmanager
def open_replicas(
    engine: EngineOptions,
    fingerprint: Fingerprint,
    num_lines: int,
    *,
    num_replicas: int,
    address: str | None,
) -> Iterator[Callable[[Iterable[Line]], Iterator[Row]]]:
    """Answer lines with replicas of the engine; on entry, one of them has loaded its model.

    Raises:
        InvalidInputError: there is no such cluster, or it is too small.
        PagespecError: Ray is not installed, or the replicas refuse the model.
    """
    ray = import_ray()
    with ExitStack() as stack:
        _connect(ray, address, stack)
        device, resources = _resources(ray, engine, num_replicas)
        rows_at_a_time = 2 * engine.config.max_num_seqs
        if num_lines < num_replicas * rows_at_a_time:  # distribute few lines evenly
            rows_at_a_time = -(-num_lines // num_replicas)
        pool = ReplicaPool(
            partial(_start_answering, _for_any_host(engine, device), fingerprint),
            partial(error_row, fingerprint),
            num_replicas=num_replicas,
            resources=resources,
            has_room=lambda: _num_places(ray, resources) > 0,
            chunk_size=max(1, rows_at_a_time // _NUM_CHUNKS),
            num_chunks=_NUM_CHUNKS,
            note=note,
        )
        stack.callback(pool.close)
        pool.start()
        yield pool.map


def _start_answering(
    engine: EngineOptions, fingerprint: Fingerprint
) -> Callable[[Sequence[Line]], list[Row]]:
    """Runs in a replica: load the model; returns a function that answers a chunk of lines."""
    llm = make_llm.start_llm(engine)
    return lambda lines: list(answer_lines(llm, fingerprint, lines))


def _for_any_host(engine: EngineOptions, device: str) -> EngineOptions:
    # A replica has another working directory. The rows' keys keep the given name of the model.
    model = engine.model
    if model is not None and Path(model).exists():
        model = str(Path(model).resolve())
    return EngineOptions(model, **{**engine.config.arguments(), "device": device})


def _connect(ray: Any, address: str | None, stack: ExitStack) -> None:
    if ray.is_initialized():
        return
    if address is not None:
        _require_listener(address)
    # A cluster started by this command sends no usage statistics.
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    try:
        ray.init(address=address, log_to_driver=False, logging_level="error")
    except (OSError, RuntimeError, ValueError) as error:
        reason = " ".join(str(error).split())
        raise InvalidInputError("--ray-address", address, f"no Ray cluster: {reason}") from error
    stack.callback(ray.shutdown)


def _require_listener(address: str) -> None:
    # Without a listener, Ray retries for two minutes.
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if host and port.isdigit():
        try:
            socket.create_connection((host, int(port)), timeout=10).close()
        except OSError as error:
            limit = f"no server responds there: {error}"
            raise InvalidInputError("--ray-address", address, limit) from error


def _resources(ray: Any, engine: EngineOptions, num_replicas: int) -> tuple[str, dict[str, float]]:
    """The device of each replica, and its resources on the cluster.

    A replica needs one GPU per rank, or an equal share of the CPUs: Ray sets an actor's number of
    threads to its CPUs.

    Raises:
        InvalidInputError: the cluster can never hold all replicas.
    """
    config, num_ranks = engine.config, engine.config.tensor_parallel_size
    has_gpus = ray.cluster_resources().get("GPU", 0) > 0
    device = ("cuda" if has_gpus else "cpu") if config.device == "auto" else config.device
    if device == "cuda":
        resources = {"num_cpus": 1.0, "num_gpus": float(num_ranks)}
    else:
        most = max((_resources_of(node).get("CPU", 0) for node in ray.nodes()), default=0)
        share = num_ranks
        while share < most and _num_places(ray, {"num_cpus": share + 1}) >= num_replicas:
            share += 1
        resources = {"num_cpus": float(share), "num_gpus": 0.0}
    places = _num_places(ray, resources)
    if places < num_replicas:
        needs = " and ".join(f"{n:g} {name[4:-1].upper()}" for name, n in resources.items() if n)
        limit = f"must be at most {places}: each needs {needs} on one machine of the cluster"
        raise InvalidInputError("--replicas", num_replicas, limit)
    free = ray.available_resources()
    if any(free.get(name[4:-1].upper(), 0) < n * num_replicas for name, n in resources.items()):
        note("the cluster is busy: replicas start as resources become free")
    return device, resources


def _num_places(ray: Any, resources: dict[str, float]) -> int:
    """The number of replicas that the cluster's machines could hold if idle."""
    return sum(
        min(
            int(_resources_of(node).get(name[4:-1].upper(), 0) // needed)
            for name, needed in resources.items()
            if needed
        )
        for node in ray.nodes()
    )


def _resources_of(node: dict[str, Any]) -> dict[str, float]:
    return node["Resources"] if node["Alive"] else {}
