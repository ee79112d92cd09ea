"""Memory is bounded by the pictures, not by the text."""

import subprocess
import sys

PROGRAM = """
import resource, sys
import numpy as np, torch
from txl import ModelConfig, TransformerXL
from txl.attention.averages import Averages
from txl.attention.moment import Moment
from txl.attention.reading import read_terms
torch.manual_seed(0)
sizes = dict(n_layer=2, d_model=32, n_head=4, d_head=8, d_inner=32, mem_len=64, dropout=0.0)
model = TransformerXL(ModelConfig(vocab_size=50, **sizes))
tokens = np.random.default_rng(0).integers(0, 50, 60_000).astype(np.uint8)
averages, moment = Averages(2, 4, 128), Moment(2, 4, 128, 500, 16)
for n, layers in enumerate(read_terms(model, tokens, 0, 128)):
    averages.add(layers)
    moment.add(layers)
    if n == 30:
        early = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
print(averages.queries, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - early)
"""


def test_memory_does_not_grow_with_the_text() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True)
    queries, grown = map(int, done.stdout.split())
    assert queries == 60_000 - 127
    assert grown < 20_000  # KiB; weights of the text's 56,000 later queries alone are 229,000
