"""Updates of a training by one process or several, each with a share of the machine's cores.

    python -m implementations.processes MODEL BATCH LENGTH

Each process, started as torchrun would start it, makes an update for each line it reads; the first
process answers each line with a line of JSON that holds the loss.
"""

import atexit
import functools
import json
import os
import socket
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from harness.comparison import Entry
from implementations.models import ENWIK8_BASE
from txl import recipes
from txl.distributed import World, joined
from txl.model import make_network
from txl.model.config import config_from_json
from txl.text.streams import Streams
from txl.training.config import TrainConfig
from txl.training.update import Batches, Updater

_HERE = Path(__file__).parents[1]


class Processes:
    """Running processes of a training; `update` waits for one more update."""

    def __init__(self, count: int, threads: int, model: str, batch: int, length: int) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = str(free.getsockname()[1])
        kept = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
        paths = os.pathsep.join(map(str, [_HERE, *filter(None, [os.environ.get("PYTHONPATH")])]))
        common = {"OMP_NUM_THREADS": str(threads), "PYTHONPATH": paths, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        command = [sys.executable, "-m", "implementations.processes", model, str(batch), str(length)]
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


def entry(count: int, threads: int, model: str, batch: int, length: int) -> Entry:
    """Make an entry of one update; it is checked against one process with one thread."""
    ours = _started(count, threads, model, batch, length)

    def check() -> None:
        other = Processes(1, 1, model, batch, length)
        while len(other.losses) < 4:
            other.update()
        while len(ours.losses) < 4:
            ours.update()
        for mine, theirs in zip(ours.losses[:4], other.losses[:4], strict=True):
            if abs(mine - theirs) > 1e-4 * theirs:
                raise AssertionError(f"losses {ours.losses[:4]}, of one process {other.losses[:4]}")

    return Entry(ours.update, check, per=batch * length)


def train(model: str, batch: int, length: int, world: World) -> None:
    if model == "laptop":
        sizes = config_from_json(recipes.load(model).model | {"vocab_size": 204})
    else:
        sizes = replace(ENWIK8_BASE, n_layer=2, dropout=0.0, mem_len=length)
    config = TrainConfig(steps=100_000, batch=batch, tgt_len=length, precision="fp32")
    torch.manual_seed(0)
    device = torch.device("cpu")
    updater = Updater(make_network(sizes), config, world, device)
    tokens = np.random.default_rng(0).integers(0, 204, 1 << 22).astype(np.uint16)
    batches = Batches(Streams(tokens, batch, length), config, sizes, world, device)
    step = 0
    while step * length < sizes.mem_len:  # until the memory is full
        loss = updater.update(step, batches).loss
        step += 1
    while True:
        if world.first:
            print(json.dumps({"loss": loss}), flush=True)
        if not sys.stdin.readline():
            return
        loss = updater.update(step, batches).loss
        step += 1


if __name__ == "__main__":
    with joined(torch.device("cpu")) as world:
        train(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), world)
