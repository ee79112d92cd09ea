"""A training loop of one's own: a corpus, a model with memory, an optimizer.

python examples/train.py [TEXT]           # without a text: Python's standard library
"""

import sys
import tempfile
from pathlib import Path

import torch
from torch.nn.functional import cross_entropy

from txl import ModelConfig, TransformerXL
from txl.evaluation.evaluate import Reading, evaluate
from txl.text import corpus as corpora
from txl.text.streams import Streams


def main(text: str | None = None, steps: int = 600, batch: int = 8, length: int = 64) -> float:
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as folder:
        corpus = corpora.prepare(text, Path(folder))
        config = ModelConfig(
            vocab_size=len(corpus.vocabulary), n_layer=3, d_model=128, n_head=4, d_head=32, d_inner=512, mem_len=length
        )
        model = TransformerXL(config)
        optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=2e-3, total_steps=steps)
        # Row b of every segment goes on where row b of the one before ended.
        streams = Streams(corpus.train, batch, length)
        memory = None
        for step in range(steps):
            if streams.starts_epoch(step):
                memory = None
            tokens, targets = streams.segment(step)  # [batch, length] each, targets one token later
            logits, memory = model(tokens, memory)  # memory comes detached
            loss = cross_entropy(logits.flatten(0, 1), targets.flatten())
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.25)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad(set_to_none=True)
            if step % max(steps // 6, 1) == 0:
                print(f"update {step}: {loss.item() / 0.6931:.3f} bits a byte")
        model.eval()
        valid, start = corpus.valid, corpus.vocabulary.start
        apart = evaluate(model, valid, start, Reading(length, "segments", length), limit=20_000)
        cached = evaluate(model, valid, start, Reading(2 * length, segment=length), limit=20_000)
    print(f"validation, segments of {length} read apart: {apart.bpc:.3f} bits a byte")
    print(f"with memory, {2 * length} keys a token as in training: {cached.bpc:.3f}, {apart.bpc - cached.bpc:.3f} less")
    return cached.bpc


if __name__ == "__main__":
    main(*sys.argv[1:2])
