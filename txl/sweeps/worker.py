"""A row in a process of its own: `python -m txl.sweeps.worker FOLDER ROW DEVICE THREADS`.

It tells the sweep what happens by lines of JSON on stdout, {"line": ..} or {"error": ..}, and stops
as after Ctrl-C when it reads anything on stdin. When stdin ends the sweep is gone: it ends at once,
so that the row is free for the next one.
"""

import json
import os
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TextIO

import torch

from txl.commands.header import header
from txl.errors import TxlError
from txl.evaluation.score import Score
from txl.sweeps import ledger as ledgers
from txl.sweeps import tables
from txl.sweeps.faults import reason
from txl.sweeps.plan import make_plan
from txl.sweeps.row import run_row
from txl.sweeps.terminal import scored_line
from txl.text import corpus as data
from txl.training.trainer import Interrupted, Report, Trainer

FAILED, STOPPED = 1, 130  # exit codes


class Remote:
    """A `Watch` of another process."""

    def __init__(self, events: TextIO) -> None:
        self.events = events
        self.trainer: Trainer | None = None
        self.stopping = False

    def listen(self) -> None:
        """Waits for the word to stop; ends the process with the sweep."""
        while os.read(0, 1):
            self.stopping = True
            if self.trainer is not None:
                self.trainer.request_stop()
        os._exit(STOPPED)

    def tell(self, **event: str) -> None:
        print(json.dumps(event), file=self.events, flush=True)

    @contextmanager
    def training(self, name: str, trainer: Trainer) -> Iterator[Report]:
        self.trainer = trainer
        if self.stopping:
            trainer.request_stop()
        self.tell(line=f"{name}: {header(trainer)}")
        unit = "bpc" if trainer.corpus.vocabulary.unit == "bytes" else "ppl"

        def report(entry: dict[str, Any]) -> None:
            if "valid_loss" in entry:
                told = f"validation loss {entry['valid_loss']:.4f}, {unit} {entry[f'valid_{unit}']:.4f}"
                self.tell(line=f"{name}: step {entry['step']}: {told}")

        yield report
        self.trainer = None

    @contextmanager
    def scoring(self, name: str, attn_len: int, total: int) -> Iterator[Callable[[int], None]]:
        def told(scored: int) -> None:
            if self.stopping:
                raise Interrupted

        told(0)
        yield told

    def scored(self, name: str, score: Score) -> None:
        self.tell(line=scored_line(name, score))


def main(folder: Path, name: str, device: str, threads: int) -> int:
    """Runs a row of the folder's sweep; its exit code."""
    events = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # whatever else prints does not come between the events
    watch = Remote(events)
    threading.Thread(target=watch.listen, daemon=True).start()
    torch.set_num_threads(threads)
    try:
        ledger = ledgers.read(folder)
        if ledger is None:
            raise TxlError(f"{folder}: holds no sweep")
        corpus = data.load(ledger.corpus)
        table = tables.find(ledger.settings["table"])
        plan = make_plan(table, table.chosen(name)[0], ledger.settings, len(corpus.vocabulary))
        run_row(ledger, plan, corpus, torch.device(device), watch)
    except Interrupted:
        return STOPPED
    except Exception as error:
        watch.tell(error=reason(error, folder / name))
        return FAILED
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), sys.argv[2], sys.argv[3], int(sys.argv[4])))
