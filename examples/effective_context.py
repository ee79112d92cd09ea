"""How far back does a model look? RECL of a trained run beside an n-gram model that sees 3 words.

    txl train --run runs/a --minutes 2
    python examples/effective_context.py runs/a

Anything that gives log-probabilities can stand in a group: a function of tokens [B, n], the context
lengths `ends` and the targets [B, K] that follow each of them.
"""

import collections
import sys
from pathlib import Path

import numpy as np
import torch

import txl
from txl.paper.recl import Layout, NetworkLosses, effective_context, measure
from txl.text.corpus import load
from txl.training.run import read_record


class NGram:
    """Counts of the last `order` tokens, interpolated with those of fewer."""

    def __init__(self, tokens, order, vocab_size):
        self.order, self.vocab_size = order, vocab_size
        self.counts = collections.defaultdict(collections.Counter)
        text = tokens.tolist()
        for n in range(order + 1):
            for i in range(n, len(text)):
                self.counts[tuple(text[i - n : i])][text[i]] += 1

    def loss(self, context, target):
        p = 1 / self.vocab_size
        for n in range(min(self.order, len(context)) + 1):
            found = self.counts.get(tuple(context[len(context) - n :]))
            if found:
                total = found.total()
                weight = total / (total + 5 * len(found))
                p = weight * found[target] / total + (1 - weight) * p
        return -np.log(p)

    def __call__(self, tokens, ends, targets):
        rows = zip(tokens.tolist(), targets.tolist(), strict=True)
        return torch.tensor(
            [[self.loss(row[:e], t) for e, t in zip(ends, wanted, strict=True)] for row, wanted in rows]
        )


def main(run, samples=500, step=32, contexts=8, order=3):
    language_model, corpus = txl.load(run), load(read_record(run).corpus)
    layout = Layout(len(corpus.test), samples, step, contexts)
    group = {
        Path(run).name: NetworkLosses(language_model),
        f"{order}-gram": NGram(corpus.train[:1_000_000], order, len(corpus.vocabulary)),
    }
    losses = {name: measure(predict, corpus.test, layout) for name, predict in group.items()}
    found = effective_context(losses, layout.lengths)
    for name, effective in found.items():
        more = "at least " if effective.reached_end else ""
        print(f"{name}: {more}{effective.length} tokens; perplexity {np.exp(losses[name].mean(1)).round(3)}")
    return found


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python examples/effective_context.py RUN, a folder of txl train")
    main(sys.argv[1])
