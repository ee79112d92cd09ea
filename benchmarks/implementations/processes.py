"""Updates of one training by one process or several, each with its share of this machine's
cores."""

import atexit
import functools
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from ranks import free_port

from harness.comparison import Entry

_HERE = Path(__file__).parents[1]


class Processes:
    """A training on its way; `update` waits for one more."""

    def __init__(self, count: int, threads: int, model: str, batch: int, length: int, shard: bool) -> None:
        port = str(free_port())
        kept = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
        paths = os.pathsep.join(map(str, [_HERE, *filter(None, [os.environ.get("PYTHONPATH")])]))
        common = {"OMP_NUM_THREADS": str(threads), "PYTHONPATH": paths, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        script = str(_HERE / "implementations" / "process_worker.py")
        command = [sys.executable, script, model, str(batch), str(length), "shard" if shard else "whole"]
        self._started = []
        for rank in range(count):
            world = {} if count == 1 else {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(count)}
            out = subprocess.PIPE if rank == 0 else None
            environment = kept | common | world
            process = subprocess.Popen(command, text=True, stdin=subprocess.PIPE, stdout=out, env=environment)
            atexit.register(process.kill)
            self._started.append(process)
        self.losses = [self._loss()]

    def _loss(self) -> float:
        assert self._started[0].stdout is not None
        line = self._started[0].stdout.readline()
        if not line:
            raise RuntimeError("a process of the training has ended")
        return float(json.loads(line)["loss"])

    def update(self) -> None:
        for process in self._started:
            assert process.stdin is not None
            process.stdin.write("\n")
            process.stdin.flush()
        self.losses.append(self._loss())


@functools.cache
def _started(*given: Any) -> Processes:
    return Processes(*given)


def entry(count: int, threads: int, model: str, batch: int, length: int, shard: bool) -> Entry:
    """Of one update; checked against one process with one thread."""
    ours = _started(count, threads, model, batch, length, shard)

    def check() -> None:
        other = Processes(1, 1, model, batch, length, False)
        while len(other.losses) < 4:
            other.update()
        while len(ours.losses) < 4:
            ours.update()
        for mine, theirs in zip(ours.losses[:4], other.losses[:4], strict=True):
            if abs(mine - theirs) > 1e-4 * theirs:
                raise AssertionError(f"losses {ours.losses[:4]}, of one process {other.losses[:4]}")

    return Entry(ours.update, check, per=batch * length)
