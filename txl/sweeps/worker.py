"""A row in a process of its own: `python -m txl.sweeps.worker FOLDER ROW DEVICE THREADS`.

It tells the sweep what happens by lines of JSON on stdout, {"line": ..} or {"error": ..}, and stops
as after Ctrl-C when it reads anything on stdin. When stdin ends the sweep is gone: it ends at once,
so that the row is free for the next one.
"""

import json
import os
import sys
import threading
from pathlib import Path
from typing import TextIO

import torch

from txl.errors import TxlError
from txl.sweeps import ledger as ledgers
from txl.sweeps import tables
from txl.sweeps.faults import reason
from txl.sweeps.lines import Lines
from txl.sweeps.plan import make_plan
from txl.sweeps.row import run_row
from txl.text import corpus as data
from txl.training.trainer import Interrupted

FAILED, STOPPED = 1, 130  # exit codes


class Remote(Lines):
    """A `Watch` of another process."""

    def __init__(self, events: TextIO) -> None:
        super().__init__(lambda line: self.tell(line=line))
        self.events = events

    def listen(self) -> None:
        """Waits for the word to stop; ends the process with the sweep."""
        while os.read(0, 1):
            self.stop()
        os._exit(STOPPED)

    def tell(self, **event: str) -> None:
        print(json.dumps(event), file=self.events, flush=True)


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
