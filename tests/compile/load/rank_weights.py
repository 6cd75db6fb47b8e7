"""One of two ranks that each write their part of a checkpoint through the weight map.

    python -m tests.compile.load.rank_weights RANK STORE OLD NEW

Fails unless the engine then gives the answers of a new engine of the changed checkpoint.
"""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import load_file

from pagespec import llm
from pagespec.build import build
from pagespec.compile.model.loaded import Shard
from pagespec.distributed.group import join_group
from pagespec.kernels.collectives.library import GatherCommunicator
from tests.compile.load.weight_checks import answers, bits, engine, held_by, map_of, write_each


def main() -> None:
    rank, store, old, new = int(sys.argv[1]), *sys.argv[2:]
    torch.set_num_threads(1)
    join_group(dist.FileStore(store, 2), rank, 2, torch.device("cpu"))
    communicator = GatherCommunicator(transparent=True, is_connected=True)
    of_rank = partial(build, shard=Shard(rank, 2), communicator=communicator)
    llm.import_engine = lambda *_: of_rank  # type: ignore[assignment]
    written, fresh = engine(old), engine(new)
    wanted = answers(fresh)
    assert answers(written) != wanted
    values = load_file(Path(new) / "model.safetensors")
    weights = map_of(written)
    assert set(weights.names) == set(values)
    cut = [name for name in values if any(place.shard for place in weights.locate(name))]
    assert len(cut) > len(values) // 3
    write_each(written, ({name: value} for name, value in values.items()))
    written.reset_prefix_cache()
    assert answers(written) == wanted
    pairs = zip(held_by(written), held_by(fresh), strict=True)
    assert all(torch.equal(bits(one), bits(two)) for one, two in pairs)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
