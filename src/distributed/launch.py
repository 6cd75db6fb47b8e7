"""Build an engine over several processes: this one is rank 0, and it starts the others."""

from __future__ import annotations

import itertools
import logging
import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch

from ..build import BuiltEngine, build
from ..compile.load.load import check_shared
from ..compile.load.source import find_source
from ..compile.model.loaded import Shard
from ..engine.config import EngineConfig
from ..errors import InvalidInputError
from ..params.checks import path_of
from ..runner.cpu.threads import rank_threads, torchs_number
from ..runner.platform import resolve_device
from ..runner.step_costs import measure_costs
from ..runner.weight_budget import check_weights_fit
from .channel import Channel, State
from .group import join_group, leave_group, make_communicator, make_store
from .runner import DistributedRunner, LogitsCallback
from .workers import Workers

logger = logging.getLogger(__name__)
# Imports, and weights from a slow disk.
_IMPORT_TIMEOUT_S, _BUILD_TIMEOUT_S = 300.0, 3600.0
_NUM_SLOTS = 4
"""Steps in flight: one more is written only after the thread has taken the last one."""


def build_distributed(
    model: Any, config: EngineConfig, on_logits: Callable[..., None] | None = None
) -> BuiltEngine:
    """Same as :func:`.build.build`, over ``config.tensor_parallel_size`` processes of this host.

    Raises:
        InvalidInputError: there are too few GPUs, the model is in memory, or see build.
        UnsupportedModelError: the model has no sharding plan, or see build.
        EngineError: a rank has ended.
    """
    num_ranks = config.tensor_parallel_size
    name = path_of(model)
    if name is None:
        raise InvalidInputError(
            "tensor_parallel_size",
            num_ranks,
            "must be 1 for a model in memory; use a folder or a hub id",
        )
    devices = _devices(config, num_ranks)
    has_peer_access = _has_peer_access(devices)
    check_shared(name, num_ranks)
    drafts = config.speculation
    if drafts is not None and drafts.model is not None:
        find_source(drafts.model)
    check_weights_fit(find_source(name), config, devices)
    num_threads = torchs_number()
    if devices[0].type == "cpu":
        num_threads = rank_threads(config.threads, num_ranks)
        torch.set_num_threads(num_threads)
    channel = Channel(num_ranks)
    store = make_store(num_ranks)
    workers = Workers(channel, num_ranks)
    try:
        workers.send_settings(
            {
                "model": os.fspath(name),
                "config": config.build_arguments(),
                "devices": [str(device) for device in devices],
                "has_peer_access": has_peer_access,
                "port": store.port,
                "num_threads": num_threads,
                "num_slots": _NUM_SLOTS,
                "has_on_logits": on_logits is not None,
            }
        )
        workers.wait_for(State.IMPORTED, _IMPORT_TIMEOUT_S)
        join_group(store, 0, num_ranks, devices[0])
        communicator = make_communicator(
            devices[0],
            channel.cells[0],
            transparent=config.transparent,
            has_peer_access=has_peer_access,
        )
        own = replace(config, device=str(devices[0]))
        callback = None if on_logits is None else LogitsCallback(on_logits)
        built = build(model, own, callback, shard=Shard(0, num_ranks), communicator=communicator)
        local: Any = built.runner
        channel.make_slots(_NUM_SLOTS, local.max_staged_bytes)
        workers.wait_for(State.BUILT, _BUILD_TIMEOUT_S)
    except BaseException as error:
        try:
            # The error of a rank explains more than its closed connection.
            reason = workers.reason_of(error)
        finally:
            workers.end()
            leave_group()
        if reason is not error:
            raise reason from error
        raise
    runner = DistributedRunner(local, workers, channel, communicator, leave_group, callback)
    if drafts is None:
        return replace(built, runner=runner)
    try:
        costs = measure_costs(runner, built.config, drafts, built.max_model_len)
    except BaseException:
        runner.close()
        raise
    return replace(built, runner=runner, step_costs=costs)


def _has_peer_access(devices: Sequence[torch.device]) -> bool:
    """Whether the ranks push into each other's memory. Otherwise NCCL moves the operands."""
    if any(device.type != "cuda" for device in devices):
        return False
    from ..kernels.collectives.boxes import has_met

    if has_met():
        logger.warning(
            "this process already had an engine over several GPUs: all-reduces of this one use "
            "NCCL, which is slower; start a new process for full speed"
        )
        return False
    pairs = itertools.permutations(devices, 2)
    return all(torch.cuda.can_device_access_peer(a, b) for a, b in pairs)


def _devices(config: EngineConfig, num_ranks: int) -> list[torch.device]:
    device = resolve_device(config.device)
    if device.type == "cpu":
        return [device] * num_ranks
    if device.index is not None:
        raise InvalidInputError(
            "device", config.device, f"must be cuda: {num_ranks} ranks take the first GPUs"
        )
    num_gpus = torch.cuda.device_count()
    if num_gpus < num_ranks:
        raise InvalidInputError(
            "tensor_parallel_size", num_ranks, f"must be at most the {num_gpus} GPUs visible"
        )
    return [torch.device("cuda", rank) for rank in range(num_ranks)]
