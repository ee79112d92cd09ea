"""A Transformer-XL layer as commonly written, and with one call instead of its four lines.

python examples/drop_in.py
"""

import time

import torch
from torch import Tensor, nn

from txl_kernels import rel_attention, sinusoid


def rel_shift(x: Tensor) -> Tensor:
    """[q, k, b, h] scores of distances S - 1 .. 0 -> scores of keys 0 .. S - 1."""
    length, keys = x.shape[:2]
    padded = torch.cat([x.new_zeros(length, 1, *x.shape[2:]), x], 1)
    return padded.view(keys + 1, length, *x.shape[2:])[1:].view_as(x)


class Layer(nn.Module):
    """[length, batch, width] in and out; `fused` chooses the way, the parameters are the same."""

    def __init__(self, d_model: int = 512, n_head: int = 8) -> None:
        super().__init__()
        self.n_head, self.d_head = n_head, d_model // n_head
        self.qkv_net = nn.Linear(d_model, 3 * d_model, bias=False)
        self.r_net = nn.Linear(d_model, d_model, bias=False)
        self.o_net = nn.Linear(d_model, d_model, bias=False)
        self.r_w_bias = nn.Parameter(torch.randn(n_head, self.d_head))
        self.r_r_bias = nn.Parameter(torch.randn(n_head, self.d_head))

    def forward(self, w: Tensor, mems: Tensor, fused: bool) -> Tensor:
        length, M, keys = w.size(0), mems.size(0), mems.size(0) + w.size(0)
        heads = self.qkv_net(torch.cat([mems, w])).view(keys, w.size(1), 3, self.n_head, self.d_head)
        q, k, v = heads[M:, :, 0], heads[:, :, 1], heads[:, :, 2]
        distances = torch.arange(keys - 1, -1, -1)
        r = self.r_net(sinusoid(distances, w.size(2))).view(keys, self.n_head, self.d_head)
        if fused:
            q, k, v = (x.permute(1, 2, 0, 3) for x in (q, k, v))  # views: nothing is copied
            out = rel_attention(
                q, k[:, :, M:], v[:, :, M:], r.flip(0).transpose(0, 1), self.r_w_bias, self.r_r_bias,
                memory=(k[:, :, :M], v[:, :, :M]),
            ).permute(2, 0, 1, 3)  # fmt: skip
        else:
            AC = torch.einsum("ibnd,jbnd->ijbn", q + self.r_w_bias, k)
            BD = rel_shift(torch.einsum("ibnd,jnd->ijbn", q + self.r_r_bias, r))
            later = torch.ones(length, keys, dtype=torch.bool).triu(M + 1)[:, :, None, None]
            prob = ((AC + BD) * self.d_head**-0.5).masked_fill(later, -torch.inf).softmax(1)
            out = torch.einsum("ijbn,jbnd->ibnd", prob, v)
        return self.o_net(out.flatten(2))


def main(length: int = 512, memory: int = 512, rounds: int = 5) -> None:
    torch.manual_seed(0)
    layer, times = Layer(), {}
    w, mems = torch.randn(length, 4, 512), torch.randn(memory, 4, 512)
    outputs = {fused: layer(w, mems, fused) for fused in (False, True)}
    print(f"largest difference: {(outputs[True] - outputs[False]).abs().max():.1e}")
    for fused in (False, True) * rounds:
        began = time.perf_counter()
        layer(w, mems, fused).sum().backward()
        times.setdefault(fused, []).append(time.perf_counter() - began)
    plain, ours = (sorted(times[fused])[rounds // 2] for fused in (False, True))
    print(f"forward and backward: {plain * 1e3:.0f} ms as commonly written, {ours * 1e3:.0f} ms fused")


if __name__ == "__main__":
    main()
