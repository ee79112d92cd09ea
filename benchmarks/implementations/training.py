"""A training step of the models to compare: forward, backward, clipping and Adam, with a full
memory."""

import functools
import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from harness.comparison import Entry, require
from harness.internals import attention_of_the_layer
from implementations.models import Named, text
from implementations.original import OriginalTransformerXL
from txl import ModelConfig, TransformerXL, graphs

Trained = Callable[[Tensor], Tensor]  # returns logits [B, L, vocab_size] for tokens [B, L] after a full memory
MakeTrained = Callable[[TransformerXL, int], Trained]  # arguments: the model to train, and the batch size


def memory_states(model: TransformerXL, batch: int) -> tuple[Tensor, ...]:
    """Make a full memory, [B, M, d_model] for each layer."""
    c, device = model.config, model.device
    states = torch.randn(batch, c.mem_len, c.d_model, generator=torch.Generator().manual_seed(0)).to(device)
    return (states,) * c.n_layer


def ours(model: TransformerXL, batch: int) -> Trained:
    memory = memory_states(model, batch)
    return lambda tokens: model(tokens, memory)[0]


def original(model: TransformerXL, batch: int) -> Trained:
    memory = [x.transpose(0, 1).contiguous() for x in memory_states(model, batch)]
    theirs = OriginalTransformerXL(model, model.config.mem_len)
    return lambda tokens: theirs(tokens, memory)[0]


OURS, ORIGINAL = "rel_attention", "original"
IN_GRAPHS = ", in CUDA graphs"  # ends the name of an implementation
TRAINED = {
    OURS: Named("ours", "ours", ours),
    ORIGINAL: Named("the paper's PyTorch code", "other", original),
}


def check(make: MakeTrained, device: torch.device) -> None:
    """Check logits and gradients against the reference backend's in float64."""
    config = ModelConfig(
        vocab_size=204, n_layer=2, d_model=64, n_head=2, d_head=32, d_inner=96, dropout=0.0, mem_len=20
    )
    torch.manual_seed(0)
    model = TransformerXL(config).to(device)
    exact = TransformerXL(config).to(device).double()
    exact.load_state_dict(model.state_dict())
    memory = tuple(x.double() for x in memory_states(model, 2))
    tokens = text(2, 25, device)
    forward, names = make(model, 2), dict(exact.named_parameters())
    want = exact(tokens, memory)[0]
    right = [want, *torch.autograd.grad(_loss(want, tokens), list(names.values()))]
    for half in (False, True) if device.type == "cuda" else (False,):  # on a GPU a step runs under autocast
        with torch.autocast(device.type, torch.bfloat16, enabled=half):
            got = forward(tokens)
        found = [got, *torch.autograd.grad(_loss(got, tokens), list(model.parameters()))]
        for name, x, y in zip(["logits", *(f"gradient of {n}" for n in names)], found, right, strict=True):
            require(x, y, name, 8e-2 if half else 1e-4)


def _loss(logits: Tensor, tokens: Tensor) -> Tensor:
    logits = logits if logits.dtype == torch.float64 else logits.float()
    return F.cross_entropy(logits.flatten(0, 1), tokens.flatten())


def step(
    make: MakeTrained, config: ModelConfig, batch: int, length: int, device: torch.device, in_graphs: bool = False
) -> Callable[[], None]:
    """Return a function that makes one update, with float32 parameters, on a GPU under autocast to
    bfloat16 as in `txl train`.

    in_graphs: whether forward, backward and clipping run as one CUDA graph, and a fused Adam as
    another after the host has read the loss.
    """
    torch.manual_seed(0)
    model = TransformerXL(config).to(device).train()
    forward = make(model, batch)
    options = {"fused": True, "capturable": True} if in_graphs else {}
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-4, **options)
    tokens = text(batch, length + 1, device)

    def gradients(tokens: Tensor) -> Tensor:
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            loss = _loss(forward(tokens[:, :-1]), tokens[:, 1:])
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.25)
        return loss.detach()

    def run() -> None:
        optimizer.zero_grad(set_to_none=True)
        gradients(tokens)
        optimizer.step()

    if not in_graphs:
        return run
    for _ in range(3):
        run()
    optimizer.zero_grad(set_to_none=True)
    captured = graphs.Captured(gradients, [tokens])
    _, update = graphs.capture(optimizer.step, (), device)

    def replay(*kept: Any) -> None:
        if math.isfinite(float(captured(tokens))):
            update()

    # Graphs hold addresses alone: parameters, memory and the optimizer's state must stay.
    return functools.partial(replay, model, forward, optimizer)


def entry(
    algorithm: str, config: ModelConfig, batch: int, length: int, device: torch.device, in_graphs: bool = False
) -> Entry:
    make = TRAINED[algorithm].make
    run = step(make, config, batch, length, device, in_graphs)
    return Entry(run, functools.partial(check, make, device), per=batch * length)


def without_attention(config: ModelConfig, batch: int, length: int, device: torch.device) -> Entry:
    """Make an entry of a txl step without attention, which returns its queries and gives zero
    gradients to its other inputs; it measures the rest of the step, on a GPU in CUDA graphs, so
    that it is not the host's time."""

    def nothing(q: Tensor, k: Tensor, v: Tensor, r: Tensor, u: Tensor, w: Tensor, memory: Any, **_: Any) -> Tensor:
        return q + 0 * (sum(x.sum() for x in (k, v, r, u, w, *memory)))  # all inputs get gradients

    with attention_of_the_layer(nothing):
        whole = step(ours, config, batch, length, device, device.type == "cuda")

    def run() -> None:
        with attention_of_the_layer(nothing):
            whole()

    return Entry(run, per=batch * length)
