"""A rank beyond 0: ``python -m pagespec.distributed.worker RANK NUM_RANKS DESCRIPTOR``.

Started only by :mod:`.workers`. It reads its settings, then the numbers of steps. It does not
schedule or pack, and reports only through its cell.
"""

from __future__ import annotations

import json
import os
import queue
import signal
import sys
import threading
from typing import Any

from .channel import Channel, State


def main() -> None:
    rank, num_ranks, descriptor = map(int, sys.argv[1:])
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    messages: queue.SimpleQueue[bytes] = queue.SimpleQueue()
    threading.Thread(target=_read, args=(messages,), daemon=True).start()
    channel = Channel(num_ranks, descriptor)
    cell = channel.cells[rank]
    try:
        _serve(rank, num_ranks, channel, messages)
    except BaseException as error:
        from .workers import describe_error

        cell.text = describe_error(error)
        cell.state = State.FAILED
        os._exit(1)  # without waiting for other ranks, which may wait for this one


def _read(messages: queue.SimpleQueue[bytes]) -> None:
    """Queue the messages of rank 0. The end of the stream ends this process at once."""
    source = sys.stdin.buffer
    try:
        settings = _exactly(source, int.from_bytes(_exactly(source, 8), "little"))
        messages.put(settings)
        while True:
            messages.put(_exactly(source, 8))
    except BaseException:
        os._exit(0)


def _exactly(source: Any, num_bytes: int) -> bytes:
    found: bytes = source.read(num_bytes)
    if len(found) < num_bytes:
        raise EOFError
    return found


def _serve(rank: int, num_ranks: int, channel: Channel, messages: queue.SimpleQueue[bytes]) -> None:
    import torch

    from ..build import build
    from ..compile.model.loaded import Shard
    from ..engine.config import EngineConfig
    from .group import join_group, join_store, make_communicator

    cell = channel.cells[rank]
    settings = json.loads(messages.get())
    torch.set_num_threads(settings["num_threads"])
    device = torch.device(settings["devices"][rank])
    config = EngineConfig(**settings["config"] | {"device": settings["devices"][rank]})
    cell.state = State.IMPORTED  # from here on rank 0 waits in the library, and cannot poll
    join_group(join_store(settings["port"], num_ranks), rank, num_ranks, device)
    built = build(
        settings["model"],
        config,
        _no_logits if settings["has_on_logits"] else None,
        shard=Shard(rank, num_ranks),
        communicator=make_communicator(
            device,
            cell,
            transparent=config.transparent,
            has_peer_access=settings["has_peer_access"],
        ),
    )
    runner: Any = built.runner
    channel.make_slots(settings["num_slots"], runner.max_staged_bytes)
    cell.state = State.BUILT
    while True:
        number = int.from_bytes(messages.get(), "little", signed=True)
        if number < 0:
            channel.run(rank, ~number, runner.replay)
        else:
            channel.run(rank, number, runner.launch)


def _no_logits(*_: object) -> None:
    """Placeholder of ``on_logits``: rank 0 receives the whole logits; other ranks send parts."""


if __name__ == "__main__":
    main()
