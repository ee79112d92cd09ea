"""Worker process of one revision: runs cases on request, with the packages in the folder that is
its argument, which must be first on PYTHONPATH.

It reads a case's name a line and answers with a line of JSON, {"seconds": ..} or {"error": ..}. It
uses only the public interface, so that any two revisions can be compared.
"""

import functools
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch

import txl
import txl_kernels
from txl import Engine, ModelConfig, TransformerXL
from txl_kernels import rel_attention

Run = Callable[[], object]


def attention(
    B: int, H: int, L: int, M: int, *, backward: bool = False, times: int = 1, window: int | None = None
) -> Run:
    torch.manual_seed(0)
    sizes = [(B, H, L, 64)] * 3 + [(H, M + L, 64), (H, 64), (H, 64), (B, H, M, 64), (B, H, M, 64)]
    tensors = [torch.randn(*size, requires_grad=backward) for size in sizes]
    dout = torch.randn(B, H, L, 64)

    def run() -> None:
        for _ in range(times):
            out = rel_attention(*tensors[:6], (tensors[6], tensors[7]), window=window)
            if backward:
                torch.autograd.grad(out, tensors, dout)

    return run


def padding() -> Run:
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 8, 4, 256, 64)
    r, biases = torch.randn(4, 511, 64), torch.randn(2, 4, 64)
    end = torch.linspace(64, 256, 8).int()[:, None]
    return lambda: rel_attention(q, k, v, r, *biases, causal=False, zero_row=255, end=end)


def evaluation() -> Run:
    torch.manual_seed(0)
    engine = Engine(TransformerXL(ModelConfig(vocab_size=204, n_layer=2)), 1, 1024, 128)
    tokens = torch.randint(204, (1, 128))
    return lambda: engine(tokens)


CASES: dict[str, Callable[[], Run]] = {
    "forward, B1 H8 L512 M512": functools.partial(attention, 1, 8, 512, 512),
    "forward+backward, B1 H8 L512 M512": functools.partial(attention, 1, 8, 512, 512, backward=True),
    "forward, B1 H8 L128 M3800": functools.partial(attention, 1, 8, 128, 3800),
    "forward+backward, B1 H8 L128 M3800": functools.partial(attention, 1, 8, 128, 3800, backward=True),
    "window 128, B1 H8 L512 M512": functools.partial(attention, 1, 8, 512, 512, window=128, times=4),
    "padding, B8 H4 L256": padding,
    "decode, B1 H8 M3800": functools.partial(attention, 1, 8, 1, 3800, times=4),
    "small call, B1 H2 L8 M8": functools.partial(attention, 1, 2, 8, 8, times=200),
    "small call, forward+backward": functools.partial(attention, 1, 2, 8, 8, backward=True, times=50),
    "evaluation, 2 layers, segments of 128, 1,024 keys": evaluation,
}


def main() -> None:
    for package in (txl, txl_kernels):
        if not Path(package.__path__[0]).resolve().is_relative_to(Path(sys.argv[1]).resolve()):
            sys.exit(f"{package.__path__[0]} was imported instead of what is in {sys.argv[1]}")
    ready: dict[str, Run] = {}
    for line in sys.stdin:
        name = line.strip()
        try:
            if name not in ready:
                ready[name] = CASES[name]()
                ready[name]()  # warms up
            begin = time.perf_counter()
            ready[name]()
            answer = {"seconds": time.perf_counter() - begin}
        except Exception as error:
            answer = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
