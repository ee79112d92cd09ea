"""One call of rel_attention replaces the score, shift, mask and softmax lines of a layer in the
original's layout."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from implementations.original import original_qkbh
from txl_kernels import rel_attention, sinusoid
from txl_kernels.backends import cpu
from txl_kernels.call import Call

L, M, B, H, D = 7, 5, 3, 2, 6


class PlainLayer(nn.Module):
    """A Transformer-XL attention layer as commonly written: [length, batch, heads, width], r for
    distances S-1 .. 0."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv_net = nn.Linear(H * D, 3 * H * D, bias=False)
        self.r_net = nn.Linear(H * D, H * D, bias=False)
        self.r_w_bias = nn.Parameter(torch.randn(H, D))
        self.r_r_bias = nn.Parameter(torch.randn(H, D))

    def forward(self, w: Tensor, mems: Tensor, fused: bool) -> Tensor:
        heads = self.qkv_net(torch.cat([mems, w])).view(M + L, B, 3, H, D)
        q, k, v = heads[M:, :, 0], heads[:, :, 1], heads[:, :, 2]
        r = self.r_net(sinusoid(torch.arange(M + L - 1, -1, -1), H * D)).view(M + L, H, D)
        if not fused:
            return original_qkbh(q, k, v, r, self.r_w_bias, self.r_r_bias)
        q, k, v = (x.permute(1, 2, 0, 3) for x in (q, k, v))
        out = rel_attention(
            q, k[:, :, M:], v[:, :, M:], r.flip(0).transpose(0, 1), self.r_w_bias, self.r_r_bias,
            memory=(k[:, :, :M], v[:, :, :M]),
        )  # fmt: skip
        return out.permute(2, 0, 1, 3)


def test_equal_outputs_and_gradients() -> None:
    layer = PlainLayer()
    w, mems = torch.randn(L, B, H * D, requires_grad=True), torch.randn(M, B, H * D)
    weight = torch.randn(L, B, H, D)

    def run(fused: bool) -> list[Tensor]:
        out = layer(w, mems, fused)
        return [out, *torch.autograd.grad((out * weight).sum(), [w, *layer.parameters()])]

    for plain, ours in zip(run(False), run(True), strict=True):
        torch.testing.assert_close(ours, plain, rtol=1e-5, atol=1e-5)


def test_q_k_v_are_not_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel gets the very storage of the fused projection."""
    layer = PlainLayer()
    seen: list[int] = []
    real = cpu.forward

    def spy(call: Call, *rest: Any) -> Any:
        seen.extend(x.untyped_storage().data_ptr() for x in (call.q, call.k, call.v, call.k_mem, call.v_mem))
        return real(call, *rest)

    monkeypatch.setattr(cpu, "forward", spy)
    layer(torch.randn(L, B, H * D), torch.randn(M, B, H * D), True)
    assert len(seen) == 5
    assert len(set(seen)) == 1
