"""A process of a training, as torchrun would start it: process_worker.py MODEL BATCH LENGTH SHARD.

An update for each line it reads; the first process answers each by a line of JSON with the loss.
"""

import json
import sys
from dataclasses import replace

import numpy as np
import torch

from implementations.models import ENWIK8_BASE
from txl import recipes
from txl.distributed import World, joined
from txl.model import make_network
from txl.model.config import config_from_json
from txl.text.streams import OrderedStreams
from txl.training.config import TrainConfig
from txl.training.data import Batches
from txl.training.update import Updater


def train(model: str, batch: int, length: int, shard: bool, world: World) -> None:
    if model == "laptop":
        sizes = config_from_json(recipes.load(model).model | {"vocab_size": 204})
    else:
        sizes = replace(ENWIK8_BASE, n_layer=2, dropout=0.0, mem_len=length)
    config = TrainConfig(steps=100_000, batch=batch, tgt_len=length, precision="fp32")
    torch.manual_seed(0)
    device = torch.device("cpu")
    updater = Updater(make_network(sizes), config, world, device, shard)
    tokens = np.random.default_rng(0).integers(0, 204, 1 << 22).astype(np.uint16)
    batches = Batches(OrderedStreams(tokens, batch, length), config, sizes, world, device)
    step = 0
    while step * length < sizes.mem_len:  # until memory is full
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
    name, batch, length, shard = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4] == "shard"
    with joined(torch.device("cpu"), always=shard) as world:
        train(name, batch, length, shard, world)
