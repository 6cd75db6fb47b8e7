"""Run entries of transformers' mapping, each in its own process with a time limit."""

from __future__ import annotations

import datetime
import json
import multiprocessing as mp
import os
import time
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkProcess
from pathlib import Path

import torch
import transformers
from transformers import logging
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from tests.coverage.entry import Entry, run_entry

SECONDS_AN_ENTRY = 240
ENTRIES = tuple(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


@dataclass
class Sweep:
    """The results of the entries with one pair of versions."""

    transformers: str
    torch: str
    date: str
    num_processes: int
    seconds: float = 0.0
    entries: list[Entry] = field(default_factory=list)

    @classmethod
    def now(cls, num_processes: int) -> Sweep:
        today = datetime.date.today().isoformat()
        return cls(transformers.__version__, torch.__version__, today, num_processes)

    @classmethod
    def load(cls, path: Path) -> Sweep:
        found = json.loads(path.read_text())
        return cls(**{**found, "entries": [Entry(**entry) for entry in found["entries"]]})

    def save(self, path: Path) -> None:
        path.write_text(json.dumps(asdict(self), indent=1) + "\n")

    def run(self, model_types: Sequence[str]) -> Iterator[Entry]:
        """Adds each result when its entry ends, and yields it."""
        begin = time.perf_counter()
        for entry in results(model_types, self.num_processes):
            self.entries.append(entry)
            self.seconds = time.perf_counter() - begin
            yield entry


def results(model_types: Sequence[str], num_processes: int) -> Iterator[Entry]:
    """The result of each entry, in the order in which they end.

    Processes are forked from this one, which has imported everything and computed nothing:
    importing torch and transformers takes longer than most entries.
    """
    context = mp.get_context("fork")
    left = list(reversed(model_types))
    running: dict[Connection, tuple[str, ForkProcess, float]] = {}
    while left or running:
        while left and len(running) < num_processes:
            model_type = left.pop()
            receiver, sender = context.Pipe(duplex=False)
            process = context.Process(target=_run, args=(model_type, sender))
            process.start()
            sender.close()
            running[receiver] = model_type, process, time.monotonic()
        ended = wait(running, timeout=1.0)
        for receiver, (model_type, process, begin) in list(running.items()):
            if receiver in ended:
                entry = _received(model_type, receiver, process)
            elif time.monotonic() - begin > SECONDS_AN_ENTRY:
                process.kill()
                entry = Entry(model_type, "failed", f"it took more than {SECONDS_AN_ENTRY} s")
            else:
                continue
            process.join()
            receiver.close()
            del running[receiver]
            yield entry


def _received(model_type: str, receiver: Connection, process: ForkProcess) -> Entry:
    try:
        entry: Entry = receiver.recv()
    except EOFError:
        process.join()
        return Entry(model_type, "failed", f"it ended with code {process.exitcode}")
    return entry


def _run(model_type: str, sender: Connection) -> None:
    # What they print is not about the engine.
    warnings.filterwarnings("ignore")
    logging.set_verbosity_error()
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 1)
    os.dup2(null, 2)
    sender.send(run_entry(model_type))
    sender.close()
