"""A GTrXL layer (Parisotto et al. 2020) whose segments and memory hold several episodes.

Training reads whole segments; acting takes one step at a time from a cache. Both give the same.

    python examples/gtrxl.py
"""

import torch
from torch import Tensor, nn

from txl_kernels import KeyValueCache, RelAttention, start_from_done


class Gate(nn.Module):
    """GRU gating of a residual x with a new y (the paper's equations 3 to 6)."""

    def __init__(self, width: int, bias: float = 2.0) -> None:
        super().__init__()
        self.from_y = nn.Linear(width, 3 * width, bias=False)
        self.from_x = nn.Linear(width, 2 * width, bias=False)
        self.reset_x = nn.Linear(width, width, bias=False)
        self.bias = nn.Parameter(torch.full((width,), bias))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        reset_y, update_y, new_y = self.from_y(y).chunk(3, -1)
        reset_x, update_x = self.from_x(x).chunk(2, -1)
        update = torch.sigmoid(update_y + update_x - self.bias)
        new = torch.tanh(new_y + self.reset_x(torch.sigmoid(reset_y + reset_x) * x))
        return (1 - update) * x + update * new


class GatedLayer(nn.Module):
    """x [B, L, width]; memory: the inputs of the M steps before."""

    def __init__(self, width: int = 64, n_head: int = 4) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = RelAttention(width, n_head)
        self.mlp = nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, width))
        self.gate1, self.gate2 = Gate(width), Gate(width)

    def forward(self, x: Tensor, memory: Tensor, done: Tensor, memory_done: Tensor) -> Tensor:
        start = start_from_done(done, memory.size(1), memory_done)
        return self._rest(x, self.attention(self.norm1(x), self.norm1(memory).detach(), start=start))

    @torch.no_grad()
    def step(self, x: Tensor, cache: KeyValueCache) -> Tensor:
        return self._rest(x, self.attention(self.norm1(x), cache=cache))

    def _rest(self, x: Tensor, attended: Tensor) -> Tensor:
        x = self.gate1(x, torch.relu(attended))
        return self.gate2(x, torch.relu(self.mlp(self.norm2(x))))


def main(environments: int = 8, memory_len: int = 32, length: int = 16) -> None:
    torch.manual_seed(0)
    layer = GatedLayer().eval()
    steps = torch.randn(environments, memory_len + length, 64)
    done = torch.rand(environments, memory_len + length) < 0.1  # as env.step returns it
    x, memory = steps[:, memory_len:], steps[:, :memory_len]
    segment = layer(x, memory, done[:, memory_len:], done[:, :memory_len])

    cache = layer.attention.new_cache(environments, mem_len=memory_len + length, max_segment=1)
    acted = []
    for t in range(memory_len + length):
        acted.append(layer.step(steps[:, t : t + 1], cache))
        cache.reset(done[:, t])  # the next step of these begins another episode
    stepped = torch.cat(acted[memory_len:], 1)
    print(
        f"{int(done.sum())} episodes ended; step by step and as a segment differ by {(stepped - segment).abs().max():.1e}"
    )
    print(cache)
    torch.testing.assert_close(stepped, segment, rtol=1e-4, atol=1e-5)


if __name__ == "__main__":
    main()
