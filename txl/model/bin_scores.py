"""Scores of bins whose tables are rows of one: a backward that writes each row's gradient once."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable


class ScoresOfRows(torch.autograd.Function):
    """hidden_i @ table[bounds[i] : bounds[i + 1]]^T + bias[..] of each bin i.

    By slices autograd would make, for each bin, a gradient as large as its rows, and then one of
    the whole table from them: of a large vocabulary most of a step's memory traffic.
    """

    @staticmethod
    def forward(ctx: Any, table: Tensor, bias: Tensor, bounds: tuple[int, ...], *hidden: Tensor) -> tuple[Tensor, ...]:
        """table [V, d], bias [V], hidden_i [N_i, d] -> scores_i [N_i, tokens of bin i]."""
        ctx.save_for_backward(table, bias, *hidden)
        ctx.bounds = bounds
        return tuple(
            F.linear(h, table[bounds[i] : bounds[i + 1]], bias[bounds[i] : bounds[i + 1]]) for i, h in enumerate(hidden)
        )

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        table, bias, *hidden = ctx.saved_tensors
        d_table, d_bias, d_hidden = torch.empty_like(table), torch.empty_like(bias), []
        for i, (grad, h) in enumerate(zip(grads, hidden, strict=True)):
            rows = slice(ctx.bounds[i], ctx.bounds[i + 1])
            weight = table[rows]
            if grad.dtype == table.dtype == h.dtype:
                torch.mm(grad.t(), h, out=d_table[rows])
            else:  # under autocast
                d_table[rows] = grad.t() @ h.to(grad.dtype)
                weight = weight.to(grad.dtype)
            d_bias[rows] = grad.sum(0)
            d_hidden.append((grad @ weight).to(h.dtype))
        return (d_table, d_bias, None, *d_hidden)
