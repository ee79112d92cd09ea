"""The released train.py's loop and data_utils.py's iterators, rewritten plainly in their order of
operations. Batch first; the model is `implementations.original`'s."""

import math

import torch
from torch.nn import functional

from implementations.original import OriginalTransformerXL


def ordered(data, batch, length):
    """LMOrderedIterator over data [n]: (inputs, targets) [batch, l <= length]."""
    steps = len(data) // batch
    rows = data[: steps * batch].view(batch, steps)
    for begin in range(0, steps - 1, length):
        end = begin + min(length, steps - 1 - begin)
        yield rows[:, begin:end], rows[:, begin + 1 : end + 1]


def shuffled(sentences, batch, length):
    """LMShuffledIterator without shuffling, over sentences `<S> w1 .. wn <S>`."""
    sentences, held = iter(sentences), [None] * batch
    while True:
        inputs, targets = torch.full((batch, length), -1), torch.full((batch, length), -1)
        for row in range(batch):
            filled = 0
            while filled < length:
                if held[row] is None or len(held[row]) <= 1:
                    held[row] = next(sentences, None)
                    if held[row] is None:
                        return
                new = min(len(held[row]) - 1, length - filled)
                inputs[row, filled : filled + new] = torch.tensor(held[row][:new])
                targets[row, filled : filled + new] = torch.tensor(held[row][1 : new + 1])
                held[row] = held[row][new:]
                filled += new
        yield inputs, targets


def train(model, data, *, max_step, batch, length, lr, clip, warmup_step=0, eta_min=0.0, batch_chunk=1):
    """Train in place with `--optim adam --scheduler cosine`; return losses and learning rates."""
    original = OriginalTransformerXL(model, model.config.mem_len)
    optimizer = torch.optim.Adam(model.parameters(), lr=lr)
    losses, rates = [], []
    while True:
        memories = [None] * batch_chunk
        for inputs, targets in ordered(data, batch, length):
            model.zero_grad()
            total = 0.0
            for n, (x, y) in enumerate(zip(inputs.chunk(batch_chunk), targets.chunk(batch_chunk), strict=True)):
                logits, memories[n] = original(x, memories[n])
                loss = functional.cross_entropy(logits.flatten(0, 1), y.flatten()) / batch_chunk
                loss.backward()
                total += loss.item()
            torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
            losses.append(total)
            rates.append(optimizer.param_groups[0]["lr"])
            optimizer.step()
            step = len(losses)
            if step < warmup_step:
                rate = lr * step / warmup_step
            else:  # CosineAnnealingLR.step(step)
                rate = eta_min + (lr - eta_min) * (1 + math.cos(math.pi * step / max_step)) / 2
            optimizer.param_groups[0]["lr"] = rate
            if step == max_step:
                return losses, rates
