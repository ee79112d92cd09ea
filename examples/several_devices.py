"""A run that several processes train together; alone it is one process.

torchrun --nproc-per-node 2 examples/several_devices.py
"""

import tempfile
from pathlib import Path

import torch

from txl import ModelConfig
from txl.distributed import joined, local_device
from txl.text import corpus as corpora
from txl.training.config import TrainConfig
from txl.training.trainer import Trainer


def main(steps: int = 40) -> float:
    device = torch.device(local_device("cuda" if torch.cuda.is_available() else "cpu"))
    with joined(device) as world:
        # All processes need the folder, and the same one: the first chooses it.
        folder = Path(world.first_does(lambda: tempfile.mkdtemp(prefix="txl-")))
        corpus = corpora.load(world.first_does(lambda: corpora.prepare(None, folder / "corpus").folder))
        model = ModelConfig(
            vocab_size=len(corpus.vocabulary), n_layer=3, d_model=128, n_head=4, d_head=32, d_inner=512, mem_len=64
        )
        config = TrainConfig(steps=steps, batch=8, tgt_len=64, lr=2e-3, eval_every=steps, save_every=steps)
        trainer = Trainer(folder / "run", corpus, model, config, device=device, world=world)
        trainer.run(report=lambda entry: print(entry))  # of the first process
        rows = trainer.batches.rows
        print(f"process {world.rank} of {world.size}: streams {rows.start} to {rows.stop - 1}; {trainer.last}")
        return trainer.best_loss


if __name__ == "__main__":
    main()
