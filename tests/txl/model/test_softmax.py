"""Adaptive softmax and input: by definition, against torch's module, errors; invalid options of a
model."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from model_helpers import small_config, small_model
from torch import Tensor, nn

from txl import TransformerXL
from txl.errors import TxlError

CUTOFFS = (4, 9, 20)
KINDS: dict[str, dict[str, object]] = {
    "one bin": {"vocab_size": 31},
    "one bin, narrow": {"d_embed": 6},
    "div_val 1": {"cutoffs": CUTOFFS},
    "div_val 1, narrow": {"cutoffs": CUTOFFS, "d_embed": 6},
    "div_val 1, narrow, tied": {"cutoffs": CUTOFFS, "d_embed": 6, "tie_projs": "tail"},
    "div_val 2": {"cutoffs": CUTOFFS, "div_val": 2},
    "div_val 2, tied": {"cutoffs": CUTOFFS, "div_val": 2, "tie_projs": "tail"},
    "div_val 2, all tied": {"cutoffs": CUTOFFS, "div_val": 2, "tie_projs": "all"},
    "div_val 2, first not projected": {"cutoffs": CUTOFFS, "div_val": 2, "proj_same_dim": False},
    "div_val 2, own tables": {"cutoffs": CUTOFFS, "div_val": 2, "tie_weight": False},
}


def log_prob(model: TransformerXL, h: Tensor, w: int) -> Tensor:
    """Return the log-probability of token w after state h [d_model], by the docstring's formula."""
    softmax, bounds = model.softmax, (0, *model.config.cutoffs, model.config.vocab_size)

    def scores(i: int) -> Tensor:
        rows = slice(bounds[i], bounds[i + 1])
        table = softmax.tables[i] if model.config.div_val > 1 else softmax.tables[0][rows]
        state = softmax.projections[str(i)].T @ h if str(i) in softmax.projections else h
        tail = table @ state + softmax.bias[rows]
        if i or len(bounds) == 2:
            return tail
        return torch.cat([tail, softmax.cluster_weight @ state + softmax.cluster_bias])

    head = scores(0).log_softmax(0)
    i = next(i for i in range(len(bounds) - 1) if w < bounds[i + 1])
    return head[w] if i == 0 else head[bounds[1] + i - 1] + scores(i).log_softmax(0)[w - bounds[i]]


@pytest.mark.parametrize("options", KINDS.values(), ids=KINDS)
def test_by_definition(options: dict[str, object]) -> None:
    model = small_model(**options)
    hidden = torch.randn(2, 5, 16, dtype=torch.float64)
    log_probs = model.softmax.log_probs(hidden)
    assert log_probs.shape == (2, 5, 31)
    torch.testing.assert_close(log_probs.exp().sum(-1), torch.ones(2, 5, dtype=torch.float64), rtol=0, atol=1e-13)
    torch.testing.assert_close(model.logits(hidden).log_softmax(-1), log_probs, rtol=0, atol=1e-13)
    want = torch.stack([log_prob(model, hidden[0, 0], w) for w in range(31)])
    torch.testing.assert_close(log_probs[0, 0], want, rtol=0, atol=1e-12)
    targets = torch.randint(31, (2, 5))
    targets[1, 3] = -100
    nll = model.softmax.nll(hidden, targets)
    want = -log_probs.gather(-1, targets.clamp(min=0).unsqueeze(-1)).squeeze(-1)
    want[1, 3] = 0
    torch.testing.assert_close(nll, want, rtol=0, atol=1e-12)


@pytest.mark.parametrize("options", KINDS.values(), ids=KINDS)
def test_input_by_definition(options: dict[str, object]) -> None:
    model = small_model(**options)
    embedding, c = model.embedding, model.config
    tokens = torch.arange(31).view(1, 31)
    got, bounds = model.embed(tokens)[0], (0, *c.cutoffs, 31)
    for w in range(31):
        i = 0 if c.div_val == 1 else next(i for i in range(len(bounds)) if w < bounds[i + 1])
        row = embedding.tables[i][w - bounds[i]]
        if str(i) in embedding.projections:
            row = embedding.projections[str(i)] @ row
        torch.testing.assert_close(got[w], row * math.sqrt(16), rtol=0, atol=1e-13)


@pytest.mark.parametrize("div_val", [2, 4])
def test_against_torchs_adaptive_softmax(div_val: int) -> None:
    """torch's has no projection of the head and no biases in the tails."""
    model = small_model(cutoffs=CUTOFFS, div_val=div_val, d_model=64, proj_same_dim=False)
    ours = model.softmax
    theirs = nn.AdaptiveLogSoftmaxWithLoss(64, 31, list(CUTOFFS), float(div_val), head_bias=True).double()
    with torch.no_grad():
        ours.bias[CUTOFFS[0] :] = 0
        theirs.head.weight.copy_(torch.cat([ours.tables[0], ours.cluster_weight]))
        theirs.head.bias.copy_(torch.cat([ours.bias[: CUTOFFS[0]], ours.cluster_bias]))
        for i, (down, up) in enumerate(theirs.tail, 1):
            down.weight.copy_(ours.projections[str(i)].T)
            up.weight.copy_(ours.tables[i])
    hidden = torch.randn(40, 64, dtype=torch.float64, requires_grad=True)
    targets = torch.randint(31, (40,))
    torch.testing.assert_close(ours.log_probs(hidden), theirs.log_prob(hidden), rtol=0, atol=1e-12)
    nll = ours.nll(hidden.unsqueeze(0), targets.unsqueeze(0))[0]
    torch.testing.assert_close(nll, -theirs(hidden, targets).output, rtol=0, atol=1e-12)
    mine = torch.autograd.grad(nll.mean(), [hidden, *ours.tables, ours.cluster_weight])
    other = torch.autograd.grad(
        theirs(hidden, targets).loss, [hidden, theirs.head.weight, *(up.weight for _, up in theirs.tail)]
    )
    torch.testing.assert_close(mine[0], other[0], rtol=0, atol=1e-12)
    torch.testing.assert_close(torch.cat([mine[1], mine[-1]]), other[1], rtol=0, atol=1e-12)
    for a, b in zip(mine[2:-1], other[2:], strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-12)


@pytest.mark.parametrize("options", KINDS.values(), ids=KINDS)
@pytest.mark.parametrize("tokens", [[0, 1, 2], [20, 30, 25], []], ids=str)
def test_parameters_of_empty_bins_have_gradients(options: dict[str, object], tokens: list[int]) -> None:
    """Data-parallel training would wait for the gradients of an empty bin."""
    model = small_model(**options)
    block = torch.tensor([tokens or [3, 3, 3]])
    targets = block if tokens else torch.full_like(block, -100)
    model.softmax.nll(model.read(block).hidden, targets).sum().backward()
    assert [name for name, p in model.named_parameters() if p.grad is None] == []


@given(st.lists(st.sampled_from([-100, *range(31)]), min_size=1, max_size=12))
def test_order_of_the_targets_does_not_matter(targets: list[int]) -> None:
    softmax = small_model(cutoffs=CUTOFFS, div_val=2).softmax
    hidden = torch.randn(1, len(targets), 16, dtype=torch.float64)
    wanted = torch.tensor([targets])
    one_by_one = [softmax.nll(hidden[:, i : i + 1], wanted[:, i : i + 1]) for i in range(len(targets))]
    torch.testing.assert_close(softmax.nll(hidden, wanted), torch.cat(one_by_one, 1), rtol=0, atol=1e-12)


def test_loss_is_float32_of_bfloat16_states() -> None:
    softmax = small_model(cutoffs=CUTOFFS, div_val=2).bfloat16().softmax
    hidden, targets = torch.randn(1, 6, 16), torch.tensor([[1, 5, 25, 26, 3, -100]])
    nll = softmax.nll(hidden.bfloat16(), targets)
    assert nll.dtype == torch.float32
    exact = small_model(cutoffs=CUTOFFS, div_val=2).softmax.nll(hidden.double(), targets)
    torch.testing.assert_close(nll.double(), exact, rtol=0, atol=0.15)


def test_tables_are_shared_only_where_they_are_tied() -> None:
    def ids(options: dict[str, object]) -> tuple[list[bool], list[bool]]:
        model = small_model(cutoffs=CUTOFFS, div_val=2, **options)
        tables = [a is b for a, b in zip(model.embedding.tables, model.softmax.tables, strict=True)]
        ours, theirs = model.embedding.projections, model.softmax.projections
        return tables, [ours[k] is theirs[k] for k in theirs]

    assert ids({}) == ([True] * 4, [False] * 4)
    assert ids({"tie_projs": "tail"}) == ([True] * 4, [False, True, True, True])
    assert ids({"tie_projs": "all"}) == ([True] * 4, [True] * 4)
    assert ids({"tie_weight": False}) == ([False] * 4, [False] * 4)


def test_invalid_targets() -> None:
    softmax = small_model(cutoffs=CUTOFFS).softmax
    hidden = torch.randn(1, 3, 16, dtype=torch.float64)
    with pytest.raises(ValueError, match=r"targets must be \[1, 3\], like hidden, got \[3\]"):
        softmax.nll(hidden, torch.zeros(3, dtype=torch.long))
    for wrong in (31, -1):
        with pytest.raises(ValueError, match="targets must be from 0 to 30, or -100 to be ignored"):
            softmax.nll(hidden, torch.tensor([[0, wrong, 2]]))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dropout": 1.0}, "dropout must be <= 0.999999, got 1.0"),
        ({"d_model": 15}, r"d_model must be even .*, got 15"),
        ({"initial_memory": "ones"}, "initial_memory must be one of empty, zeros, got 'ones'"),
        ({"cutoffs": (9, 4)}, r"cutoffs must increase, above 0 and below the 31 of vocab_size, got \[9, 4\]"),
        ({"cutoffs": (0, 4)}, "cutoffs must increase"),
        ({"cutoffs": (4, 31)}, "cutoffs must increase"),
        (
            {"cutoffs": CUTOFFS, "div_val": 4},
            r"div_val = 4 makes the last of 4 bins 0 wide: d_embed = 16 is less than 4\^3",
        ),
        ({"div_val": 2}, "div_val = 2 needs cutoffs"),
        ({"tie_projs": "some"}, "tie_projs must be one of none, tail, all, got 'some'"),
        ({"tie_projs": "all", "tie_weight": False}, "tie_projs needs tie_weight"),
        ({"tie_projs": "tail", "cutoffs": ()}, "tie_projs = tail needs cutoffs"),
        ({"encoding": "rotary"}, "sinusoid, learned, got 'rotary'"),
        ({"encoding": "shaw"}, "table_len must be given with encoding='shaw'"),
        ({"table_len": 3}, "table_len is for a learned encoding"),
        ({"encoding": "sinusoid", "clamp_len": 3}, "clamp_len is for encoding='relative', not 'sinusoid'"),
        ({"encoding": "shaw", "table_len": 3, "untie_r": True}, "untie_r is for encoding='relative'"),
    ],
)
def test_invalid_options(options: dict[str, object], message: str) -> None:
    with pytest.raises(TxlError, match=message):
        small_config(**options)


def test_memory_is_that_of_the_bins_hit() -> None:
    """One row of logits for 200,000 tokens would be 0.8 MB a target."""
    with torch.device("meta"):
        model = TransformerXL(small_config(vocab_size=200_000, cutoffs=(1000, 2000), div_val=2))
    softmax = model.to_empty(device="cpu").softmax
    for p in model.parameters():
        nn.init.normal_(p, 0, 0.1)
    seen: list[int] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: seen.append(x.numel()) or x, lambda x: x):
        softmax.nll(torch.randn(4, 64, 16), torch.randint(1000, (4, 64)))
    tables = sum(p.numel() for p in (*softmax.parameters(), *softmax.tables))
    assert sum(n for n in seen if n > 0) < 2 * tables + 6 * 256 * 1002


@pytest.mark.parametrize("options", KINDS.values(), ids=KINDS)
def test_under_autocast(options: dict[str, object]) -> None:
    model = TransformerXL(small_config(**options))
    tokens = torch.arange(31).view(1, 31)
    with torch.autocast("cpu", torch.bfloat16):
        hidden = model.embed(tokens)
        assert hidden.dtype == torch.float32, "the residual stream stays float32, as with one table"
        nll = model.softmax.nll(hidden, tokens)
    assert nll.dtype == torch.float32
    torch.testing.assert_close(nll, model.softmax.nll(model.embed(tokens), tokens), rtol=2e-2, atol=2e-2)
