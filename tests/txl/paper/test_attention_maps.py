"""The terms of the scores sum to what the kernel takes, and average to what others see."""

import subprocess
import sys

import numpy as np
import pytest
import torch
from hugging_face_model import SIZES, transfo_xl
from model_helpers import small_config, small_model

from implementations.hugging_face import their_names
from txl import TransformerXL
from txl.errors import TxlError
from txl.paper.attention_maps import Attention, check_attention, marked, read_weights, weights_of_terms

TEXT = np.random.default_rng(0).integers(0, 31, 60).astype(np.uint8)
WINDOW = 9
ENCODINGS = [{}, {"clamp_len": 4}, {"encoding": "shaw", "table_len": 6}, {"encoding": "shaw-released", "table_len": 6}]


def by_distance(weights: torch.Tensor, window: int) -> torch.Tensor:
    """[H, L, M + L] by key -> [H, L, W] by distance."""
    _, length, keys = weights.shape
    rows = [weights[:, i, keys - length + i - window + 1 : keys - length + i + 1].flip(-1) for i in range(length)]
    return torch.stack(rows, 1)


@pytest.mark.parametrize("options", ENCODINGS)
def test_the_weights_are_the_kernels(options):
    torch.manual_seed(1)
    attention = small_model(**options).layers[0].attention
    x, memory = torch.randn(1, 5, 16).double(), torch.randn(1, WINDOW - 1 + 3, 16).double()
    with torch.no_grad():
        weights = weights_of_terms(attention, x, memory, WINDOW)["all"]
        attention.window = WINDOW
        expected = by_distance(attention.weights(x, memory)[0], WINDOW)
    torch.testing.assert_close(weights, expected.double(), rtol=1e-9, atol=1e-12)


def test_each_term_by_its_formula():
    torch.manual_seed(2)
    attention = small_model().layers[0].attention
    x, memory = torch.randn(1, 4, 16).double(), torch.randn(1, WINDOW - 1, 16).double()
    with torch.no_grad():
        weights = weights_of_terms(attention, x, memory, WINDOW)
        q, k, k_mem, r = attention.projections(x, memory)
        keys = torch.cat([k_mem, k], 2)[0]
        u, v = (bias.detach() for bias in attention.biases())
    for h in range(2):
        for i in range(4):
            pairs = [(keys[h, WINDOW - 1 + i - d], r[h, d]) for d in range(WINDOW)]
            terms = {
                "a": [q[0, h, i] @ key for key, _ in pairs],
                "b": [q[0, h, i] @ row for _, row in pairs],
                "d": [v[h] @ row for _, row in pairs],
                "all": [(q[0, h, i] + u[h]) @ key + (q[0, h, i] + v[h]) @ row for key, row in pairs],
            }
            for name, scores in terms.items():
                expected = (torch.stack(scores) / 8**0.5).softmax(-1)
                torch.testing.assert_close(weights[name][h, i], expected, rtol=1e-12, atol=0)


@pytest.mark.parametrize("segment", [1, 4, 7, 100])
@pytest.mark.parametrize("zeros", [False, True])
def test_means_do_not_depend_on_segments_and_are_of_whole_windows(segment, zeros):
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


def test_the_mean_is_that_of_hugging_faces_attentions():
    pytest.importorskip("transformers", reason="needs the `peers` extra: transformers==4.37.2")
    theirs = transfo_xl(same_length=True)  # a query sees mem_len keys, itself included
    window, text = SIZES["mem_len"], np.random.default_rng(1).integers(0, 50, 43).astype(np.uint8)
    sizes = {name: SIZES[name] for name in ("vocab_size", "n_layer", "d_model", "n_head", "d_head", "d_inner")}
    model = TransformerXL(small_config(**sizes, mem_len=window, initial_memory="zeros")).double()
    named = dict(theirs.named_parameters())
    with torch.no_grad():
        for name, parameter in their_names(model):
            parameter.copy_(named[name])
    inputs = torch.cat([torch.tensor([7]), torch.from_numpy(text[:-1].astype(np.int64))])
    total, queries, mems = torch.zeros(9, window).double(), 0, None
    for first in range(0, len(inputs), 6):
        part = inputs[first : first + 6]
        with torch.no_grad():
            out = theirs.transformer(part.unsqueeze(0), mems=mems, output_attentions=True)
        mems = out.mems
        skipped = min(max(window - 1 - first, 0), len(part))
        for layer, attentions in enumerate(out.attentions):
            rows = by_distance(attentions[0], window)[:, skipped:]
            total[3 * layer : 3 * layer + 3] += rows.sum(1).double()
        queries += len(part) - skipped
    attention = Attention(3, 3, window)
    for first, layers in read_weights(model, text, 7, window, segment=11):
        attention.add(first, layers)
    assert attention.queries == queries == 34
    torch.testing.assert_close(attention.mean(), total / queries, rtol=1e-4, atol=1e-6)


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
            q, k, _, r = block.attention.projections(block.attention_input(states.inputs[n]))
            u, v = block.attention.biases()
            for h in range(2):
                for i in range(WINDOW - 1, len(TEXT)):
                    keys = k[0, h, i - WINDOW + 1 : i + 1].flip(0)
                    a, b = keys @ q[0, h, i], r[h, :WINDOW] @ q[0, h, i]
                    c, d = keys @ u[h], r[h, :WINDOW] @ v[h]
                    for row, score in enumerate((a + b + c + d, a, b, d)):
                        sums[row, 2 * n + h] += (score / 8**0.5).softmax(-1)
    expected = sums / (len(TEXT) - WINDOW + 1)
    torch.testing.assert_close(attention.mean(), expected[0], rtol=1e-9, atol=1e-12)
    for row, term in enumerate("abd", 1):
        torch.testing.assert_close(attention.mean(term), expected[row], rtol=1e-9, atol=1e-12)


def test_a_moment_is_what_the_text_has_there():
    model = small_model()
    moment = Attention(2, 2, WINDOW, 30, 12)
    for first, layers in read_weights(model, TEXT, 3, WINDOW, segment=7):
        moment.add(first, layers)
    ((first, whole),) = read_weights(model, TEXT, 3, WINDOW, segment=len(TEXT))
    for n, weights in enumerate(whole):
        expected = weights["all"][:, 30 - first : 42 - first]
        torch.testing.assert_close(moment.weights[2 * n : 2 * n + 2], expected.float())


def test_the_largest_fifth_of_a_row_is_marked():
    weights = torch.rand(3, 10)
    picture = marked(weights)
    assert picture.shape == (3, 12)
    for row in range(3):
        assert picture[row, :row].isnan().all()
        assert picture[row, row + 10 :].isnan().all()
        inside = picture[row, row : row + 10].flip(0)
        assert inside.sum() == 2
        assert weights[row][inside == 1].min() > weights[row][inside == 0].max()


def test_the_widest_head_is_the_most_even_one():
    attention = Attention(2, 2, 4)
    weights = torch.tensor([[[0.7, 0.1, 0.1, 0.1]], [[0.25] * 4]])
    attention.add(0, [{"all": weights}, {"all": weights.flip(0)}])
    assert (attention.widest(0), attention.widest(1)) == (1, 2)


def test_what_is_not_finite_is_refused():
    attention = Attention(1, 1, 4)
    attention.add(0, [{"all": torch.full((1, 1, 4), torch.nan)}])
    with pytest.raises(TxlError, match="the attention is not finite"):
        attention.mean()


@pytest.mark.parametrize(
    ("options", "arguments", "words"),
    [
        ({}, {"window": 61}, "the text has 60 tokens, fewer than a window of 61"),
        ({}, {"window": 0}, "window and segment must be >= 1, got 0"),
        ({"mem_len": 0, "encoding": "sinusoid"}, {}, "encoding 'sinusoid' has no positions in its scores"),
        (
            {"mem_len": 0, "encoding": "learned", "table_len": 9},
            {},
            "encoding 'learned' has no positions in its scores",
        ),
    ],
)
def test_refusals(options, arguments, words):
    with pytest.raises(TxlError, match=words):
        next(read_weights(check_attention(small_model(**options)), TEXT, 0, **({"window": 8} | arguments)))


def test_no_query_no_mean():
    with pytest.raises(TxlError, match="no query has been added"):
        Attention(1, 1, 4).mean()


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


def test_memory_does_not_grow_with_the_text() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True)
    queries, grown = map(int, done.stdout.split())
    assert queries == 60_000 - 127
    assert grown < 20_000  # KiB; weights of the text's 56,000 later queries alone are 229,000
