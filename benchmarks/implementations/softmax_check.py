"""The softmax by its definition, in float64, and the refusal of what differs."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from harness.checks import require
from implementations.models import words, wt103
from txl import ModelConfig

SMALL = 2_000  # words that softmaxes are checked on
# Weight [n, d_model] and bias [n] of the head (the first bin's words, then one row for each other
# bin), and of each other bin's words.
Scores = list[tuple[Tensor, Tensor]]


def log_probs(scores: Scores, hidden: Tensor) -> Tensor:
    """Of every word, [.., vocab_size]: that of its bin, and in its bin that of the word."""
    head, *tails = ((hidden @ weight.T + bias).log_softmax(-1) for weight, bias in scores)
    first = head.size(-1) - len(tails)
    return torch.cat([head[..., :first], *(head[..., first + i, None] + tail for i, tail in enumerate(tails))], -1)


def check(
    make: Callable[[ModelConfig], nn.Module],
    loss: Callable[[Any, Tensor, Tensor], Tensor],
    scores: Callable[[Any], Scores],
    device: torch.device,
) -> None:
    """Refuses another loss or other gradients than the definition's of the same parameters."""
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
