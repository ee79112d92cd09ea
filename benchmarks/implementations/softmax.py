"""Softmaxes over a vocabulary of words as in a training step: the loss of hidden states, and
gradients of these and of all parameters.

Targets follow Zipf's law (`models.words`), so that the bins are used as often as in text. With
div_val 4, txl's module and torch's differ only by txl's biases in the tails; with div_val 1,
torch's module still projects its tails and txl's does not.
"""

import functools
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from harness.comparison import Entry, Role, require
from implementations.models import words, wt103
from implementations.ways import passes
from txl import ModelConfig
from txl.model.adaptive import AdaptiveSoftmax, init_parameters

BATCH, LENGTH = 4, 150  # of the hidden states; wt103-base's segment length
SMALL = 2_000  # vocabulary size in the checks
# Weight [n, d_model] and bias [n] of the head (the first bin's words, then one row for each other
# bin), and of each other bin's words.
Scores = list[tuple[Tensor, Tensor]]


class Softmax(NamedTuple):
    """A softmax to compare.

    Attributes:
        make: makes the module from a model configuration.
        loss: function of the module, hidden states [B, L, d_model] and targets [B, L]; returns the
            mean negative log-likelihood, a scalar.
        scores: function of the module that returns its weights and biases as `Scores`, for the
            check.
    """

    name: str
    role: Role
    make: Callable[[ModelConfig], nn.Module]
    loss: Callable[[Any, Tensor, Tensor], Tensor]
    scores: Callable[[Any], Scores]


def _ours(config: ModelConfig, div_val: int) -> AdaptiveSoftmax:
    config = replace(config, div_val=div_val, proj_same_dim=False)
    softmax = AdaptiveSoftmax(config, None)
    init_parameters(softmax, config)
    return softmax


def _loss_of_ours(softmax: AdaptiveSoftmax, hidden: Tensor, targets: Tensor) -> Tensor:
    return softmax.nll(hidden, targets).mean()


def _scores_of_ours(softmax: AdaptiveSoftmax) -> Scores:
    tables, bounds = torch.cat([_projected(softmax, i) for i in range(len(softmax.tables))]), softmax.bounds
    found = [(tables[a:b], softmax.bias[a:b]) for a, b in pairwise(bounds)]
    weight, bias = found[0]
    head = torch.cat([weight, softmax.cluster_weight]), torch.cat([bias, softmax.cluster_bias])
    return [head, *found[1:]]


def _projected(softmax: AdaptiveSoftmax, i: int) -> Tensor:
    table, projections = softmax.tables[i], softmax.projections
    return table @ projections[str(i)].T if str(i) in projections else table


def _torchs(config: ModelConfig, div_value: float) -> nn.Module:
    cutoffs = list(config.cutoffs)
    return nn.AdaptiveLogSoftmaxWithLoss(config.d_model, config.vocab_size, cutoffs, div_value, head_bias=True)


def _loss_of_torchs(softmax: nn.AdaptiveLogSoftmaxWithLoss, hidden: Tensor, targets: Tensor) -> Tensor:
    return softmax(hidden.flatten(0, 1), targets.flatten()).loss


def _scores_of_torchs(softmax: nn.AdaptiveLogSoftmaxWithLoss) -> Scores:
    tails = [(up.weight @ down.weight, up.weight.new_zeros(len(up.weight))) for down, up in softmax.tail]
    return [(softmax.head.weight, softmax.head.bias), *tails]


def _full(config: ModelConfig) -> nn.Module:
    return nn.Linear(config.d_model, config.vocab_size)


def _loss_of_full(softmax: nn.Linear, hidden: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(softmax(hidden.flatten(0, 1)), targets.flatten())


OURS, OURS_4, TORCH, TORCH_4, FULL = "adaptive", "adaptive-4", "torch-adaptive", "torch-adaptive-4", "full-softmax"
_TORCHS = "AdaptiveLogSoftmaxWithLoss, div_value"
SOFTMAXES = {
    OURS: Softmax("ours, div_val 1", "ours", functools.partial(_ours, div_val=1), _loss_of_ours, _scores_of_ours),
    OURS_4: Softmax("ours, div_val 4", "ours", functools.partial(_ours, div_val=4), _loss_of_ours, _scores_of_ours),
    TORCH: Softmax(
        f"{_TORCHS} 1", "other", functools.partial(_torchs, div_value=1), _loss_of_torchs, _scores_of_torchs
    ),
    TORCH_4: Softmax(
        f"{_TORCHS} 4", "other", functools.partial(_torchs, div_value=4), _loss_of_torchs, _scores_of_torchs
    ),
    FULL: Softmax("full softmax", "other", _full, _loss_of_full, lambda softmax: [(softmax.weight, softmax.bias)]),
}


def step(algorithm: str, vocab_size: int, device: torch.device) -> Callable[[], Tensor]:
    """Return a function that runs forward and backward with float32 parameters, on a GPU under
    autocast to bfloat16 as in `txl train`."""
    torch.manual_seed(0)
    config, softmax = wt103(vocab_size), SOFTMAXES[algorithm]
    module = softmax.make(config).to(device)
    targets = words(BATCH, LENGTH, vocab_size, device)
    hidden = torch.randn(BATCH, LENGTH, config.d_model).to(device).requires_grad_()

    def loss() -> Tensor:
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            return softmax.loss(module, hidden, targets)

    return passes(loss, (hidden, *module.parameters()), backward=True)


def log_probs(scores: Scores, hidden: Tensor) -> Tensor:
    """Return log-probabilities [.., vocab_size]: of each word's bin plus of the word in its bin."""
    head, *tails = ((hidden @ weight.T + bias).log_softmax(-1) for weight, bias in scores)
    first = head.size(-1) - len(tails)
    return torch.cat([head[..., :first], *(head[..., first + i, None] + tail for i, tail in enumerate(tails))], -1)


def check(
    make: Callable[[ModelConfig], nn.Module],
    loss: Callable[[Any, Tensor, Tensor], Tensor],
    scores: Callable[[Any], Scores],
    device: torch.device,
) -> None:
    """Check loss and gradients against those of the definition with the same parameters."""
    torch.manual_seed(0)
    config = wt103(SMALL)
    module, exact = make(config).to(device), make(config).to(device).double()
    for p in module.parameters():
        nn.init.normal_(p, 0.0, 0.1)
    exact.load_state_dict(module.state_dict())
    targets = words(2, 150, SMALL, device)
    hidden = torch.randn(2, 150, config.d_model).to(device).requires_grad_()
    states = hidden.detach().double().requires_grad_()
    want = -log_probs(scores(exact), states).gather(-1, targets.unsqueeze(-1)).mean()
    right = [want, *torch.autograd.grad(want, [states, *exact.parameters()])]
    names = ["loss", *(f"gradient of {n}" for n in ("hidden", *dict(module.named_parameters())))]
    for half in (False, True) if device.type == "cuda" else (False,):  # on a GPU a step runs under autocast
        with torch.autocast(device.type, torch.bfloat16, enabled=half):
            got = loss(module, hidden, targets)
        found = [got, *torch.autograd.grad(got, [hidden, *module.parameters()])]
        for name, x, y in zip(names, found, right, strict=True):
            require(x, y, name, 8e-2 if half else None)


def checked(algorithm: str, device: torch.device) -> Callable[[], None]:
    """Return the check of an algorithm against the definition with the weights from its
    `scores`."""
    _, _, make, loss, scores = SOFTMAXES[algorithm]
    return functools.partial(check, make, loss, scores, device)


def entry(algorithm: str, vocab_size: int, device: torch.device) -> Entry:
    return Entry(step(algorithm, vocab_size, device), checked(algorithm, device), per=BATCH * LENGTH)


def note(vocab_size: int) -> str:
    """Return a description of the work, for a case."""
    return f"{vocab_size:,} words, B{BATCH} L{LENGTH}"
