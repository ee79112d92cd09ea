"""Attention weights by term: those of the layer, averaged over a text."""

import subprocess
import sys

import numpy as np
import pytest
import torch
from model_helpers import small_model

from txl.paper.attention_maps import Attention, marked, read_weights, weights_of_terms

TEXT = np.random.default_rng(0).integers(0, 31, 60).astype(np.uint8)
WINDOW = 9
ENCODINGS = [{}, {"clamp_len": 4}, {"encoding": "shaw", "table_len": 6}, {"encoding": "shaw-released", "table_len": 6}]


def by_distance(weights: torch.Tensor, window: int) -> torch.Tensor:
    """[H, L, M + L] by key -> [H, L, W] by distance."""
    _, length, keys = weights.shape
    rows = [weights[:, i, keys - length + i - window + 1 : keys - length + i + 1].flip(-1) for i in range(length)]
    return torch.stack(rows, 1)


@pytest.mark.parametrize("options", ENCODINGS)
def test_weights_are_those_of_the_layer(options):
    torch.manual_seed(1)
    attention = small_model(**options).layers[0].attention
    x, memory = torch.randn(1, 5, 16).double(), torch.randn(1, WINDOW - 1 + 3, 16).double()
    with torch.no_grad():
        weights = weights_of_terms(attention, x, memory, WINDOW)["all"]
        attention.window = WINDOW
        expected = by_distance(attention.weights(x, memory)[0], WINDOW)
    torch.testing.assert_close(weights, expected.double(), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("segment", [1, 4, 7, 100])
@pytest.mark.parametrize("zeros", [False, True])
def test_means_do_not_depend_on_segments(segment, zeros):
    model = small_model(initial_memory="zeros" if zeros else "empty")
    whole, parts = (Attention(2, 2, WINDOW) for _ in range(2))
    for first, layers in read_weights(model, TEXT, 3, WINDOW, segment=len(TEXT)):
        whole.add(first, layers)
    for first, layers in read_weights(model, TEXT, 3, WINDOW, segment=segment):
        parts.add(first, layers)
    assert parts.queries == whole.queries == len(TEXT) - WINDOW + 1
    torch.testing.assert_close(parts.mean(), whole.mean(), rtol=1e-9, atol=1e-12)
    for term in "abd":
        torch.testing.assert_close(parts.mean(term), whole.mean(term), rtol=1e-9, atol=1e-12)
        torch.testing.assert_close(parts.mean(term).sum(-1), torch.ones(4).double())
    torch.testing.assert_close(parts.mean().sum(-1), torch.ones(4).double())


@pytest.mark.parametrize("options", [{}, {"pre_norm": True}, {"clamp_len": 3}, {"untie_r": True, "pre_norm": True}])
def test_means_query_by_query(options):
    model = small_model(**options)
    attention = Attention(2, 2, WINDOW)
    for first, layers in read_weights(model, TEXT, 3, WINDOW, segment=7):
        attention.add(first, layers)
    for block in model.layers:
        block.attention.window = WINDOW
    inputs = torch.cat([torch.tensor([3]), torch.from_numpy(TEXT[:-1].astype(np.int64))]).unsqueeze(0)
    sums = torch.zeros(4, 4, WINDOW).double()
    with torch.no_grad():
        states = model.read(inputs, mem_len=0)
        for n, block in enumerate(model.layers):
            x = block.attention.qkv(block.attention_input(states.inputs[n]))[0]
            q, k, _ = x.unflatten(-1, (3, 2, 8)).permute(1, 2, 0, 3)
            r = block.attention.project_positions(block.attention.positions(1, WINDOW - 1))
            u, v = block.attention.biases()
            for h in range(2):
                for i in range(WINDOW - 1, len(TEXT)):
                    keys = k[h, i - WINDOW + 1 : i + 1].flip(0)
                    a, b = keys @ q[h, i], r[h] @ q[h, i]
                    c, d = keys @ u[h], r[h] @ v[h]
                    for row, score in enumerate((a + b + c + d, a, b, d)):
                        sums[row, 2 * n + h] += (score / 8**0.5).softmax(-1)
    expected = sums / (len(TEXT) - WINDOW + 1)
    torch.testing.assert_close(attention.mean(), expected[0], rtol=1e-9, atol=1e-12)
    for row, term in enumerate("abd", 1):
        torch.testing.assert_close(attention.mean(term), expected[row], rtol=1e-9, atol=1e-12)


def test_stored_weights_of_some_queries():
    model = small_model()
    moment = Attention(2, 2, WINDOW, 30, 12)
    for first, layers in read_weights(model, TEXT, 3, WINDOW, segment=7):
        moment.add(first, layers)
    ((first, whole),) = read_weights(model, TEXT, 3, WINDOW, segment=len(TEXT))
    for n, weights in enumerate(whole):
        expected = weights["all"][:, 30 - first : 42 - first]
        torch.testing.assert_close(moment.weights[2 * n : 2 * n + 2], expected.float())


def test_largest_fifth_of_a_row_is_marked():
    weights = torch.rand(3, 10)
    picture = marked(weights)
    assert picture.shape == (3, 12)
    for row in range(3):
        assert picture[row, :row].isnan().all()
        assert picture[row, row + 10 :].isnan().all()
        inside = picture[row, row : row + 10].flip(0)
        assert inside.sum() == 2
        assert weights[row][inside == 1].min() > weights[row][inside == 0].max()


def test_widest_head_has_the_most_even_attention():
    attention = Attention(2, 2, 4)
    weights = torch.tensor([[[0.7, 0.1, 0.1, 0.1]], [[0.25] * 4]])
    attention.add(0, [{"all": weights}, {"all": weights.flip(0)}])
    assert (attention.widest(0), attention.widest(1)) == (1, 2)


PROGRAM = """
import re, sys
import numpy as np, torch
from txl import ModelConfig, TransformerXL
from txl.paper.attention_maps import Attention, read_weights
def peak():
    return int(re.search("VmHWM:\\s*([0-9]+) kB", open("/proc/self/status").read())[1])
torch.manual_seed(0)
sizes = dict(n_layer=2, d_model=32, n_head=4, d_head=8, d_inner=32, mem_len=64, dropout=0.0)
model = TransformerXL(ModelConfig(vocab_size=50, **sizes))
tokens = np.random.default_rng(0).integers(0, 50, 60_000).astype(np.uint8)
attention = Attention(2, 4, 128, 500, 16)
for n, (first, layers) in enumerate(read_weights(model, tokens, 0, 128)):
    attention.add(first, layers)
    if n == 30:
        early = peak()
print(attention.queries, peak() - early)
"""


@pytest.mark.slow
def test_memory_does_not_grow_with_the_text() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True)
    queries, grown = map(int, done.stdout.split())
    assert queries == 60_000 - 127
    assert grown < 20_000  # KiB; weights of the text's 56,000 later queries alone are 229,000
