"""A Conformer block (Gulati et al. 2020): attention in both directions, utterances of many lengths.

python examples/conformer.py
"""

import torch
from torch import Tensor, nn

from txl_kernels import RelAttention, end_from_lengths


class FeedForward(nn.Sequential):
    def __init__(self, d_model: int) -> None:
        super().__init__(
            nn.LayerNorm(d_model), nn.Linear(d_model, 4 * d_model), nn.SiLU(), nn.Linear(4 * d_model, d_model)
        )


class Convolution(nn.Module):
    def __init__(self, d_model: int, kernel: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(d_model)
        self.expand = nn.Linear(d_model, 2 * d_model)
        self.depthwise = nn.Conv1d(d_model, d_model, kernel, padding=kernel // 2, groups=d_model)
        self.out = nn.Sequential(nn.SiLU(), nn.Linear(d_model, d_model))

    def forward(self, x: Tensor, real: Tensor) -> Tensor:
        x = nn.functional.glu(self.expand(self.norm(x))) * real  # padding must not leak through the kernel
        return self.out(self.depthwise(x.transpose(1, 2)).transpose(1, 2))


class ConformerBlock(nn.Module):
    """Half a feed-forward, attention, convolution, half a feed-forward; x [B, T, d_model]."""

    def __init__(self, d_model: int = 144, n_head: int = 4, kernel: int = 31) -> None:
        super().__init__()
        self.first, self.second = FeedForward(d_model), FeedForward(d_model)
        self.norm = nn.LayerNorm(d_model)
        self.attention = RelAttention(d_model, n_head, causal=False)
        self.convolution = Convolution(d_model, kernel)
        self.last = nn.LayerNorm(d_model)

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        real = (torch.arange(x.size(1), device=x.device) < lengths[:, None])[:, :, None]
        x = x + self.first(x) / 2
        x = x + self.attention(self.norm(x), end=end_from_lengths(lengths))
        x = x + self.convolution(x, real)
        return self.last(x + self.second(x) / 2)


def main(frames: int = 300) -> None:
    torch.manual_seed(0)
    block = ConformerBlock()
    lengths = torch.tensor([frames, frames // 2, frames // 3])
    x = torch.randn(3, frames, 144)
    together = block(x, lengths)
    for b, n in enumerate(lengths.tolist()):
        alone = block(x[b : b + 1, :n], lengths[b : b + 1])
        difference = (together[b, :n] - alone[0]).abs().max()
        print(f"{n} frames: {difference:.1e} from the same utterance without padding")
        torch.testing.assert_close(together[b, :n], alone[0], rtol=1e-4, atol=1e-5)


if __name__ == "__main__":
    main()
