"""A layer of transformers' Parakeet in its configuration's default size, over minutes of audio: the
original, if memory suffices, and accelerated; with full context or a window.

The environment variable PEERS names the folder that `make peers` filled.
"""

import functools
import os
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from harness.comparison import Entry, Unavailable, require
from harness.machine import Machine
from implementations import bare_peers
from implementations.memory import probe
from txl_kernels.integrations import accelerate

bare_peers.use()
WIDTH, HEADS = 1024, 8
FRAMES = 750  # in a minute, after subsampling
ACCELERATED, ORIGINAL = "accelerated", "original"
Layer = Callable[[Tensor], Tensor]


def layer(way: str, window: int | None, heads: int = HEADS, width: int = WIDTH) -> tuple[Any, Layer]:
    """Make an encoder of one layer, and a function that runs that layer on frames [1, T, width].

    window: frames visible on either side, None for all. The original gets it as a mask.
    """
    if not bare_peers.AVAILABLE:
        raise Unavailable("other libraries are not here: `make peers`, and PEERS=.peers in the environment")
    torch.manual_seed(0)
    m = bare_peers.transformers("parakeet")
    config = m.ParakeetEncoderConfig(
        num_hidden_layers=1, hidden_size=width, intermediate_size=4 * width, num_attention_heads=heads,
        num_key_value_heads=heads,
    )  # fmt: skip
    config._attn_implementation = "sdpa"
    model = m.ParakeetEncoder(config).eval()
    if way == ACCELERATED:
        accelerate(model, strict=True, window=None if window is None else (window, window))

    def run(x: Tensor) -> Tensor:
        mask = None
        if way == ORIGINAL and window is not None:
            at = torch.arange(x.size(1))
            mask = ((at.unsqueeze(1) - at).abs() <= window)[None, None]
        with torch.no_grad():
            out: Tensor = model.layers[0](x, attention_mask=mask, position_embeddings=model.encode_positions(x))
        return out

    return model, run


def step(way: str, window: int | None, frames: int) -> Callable[[], Tensor]:
    _, run = layer(way, window)
    x = torch.randn(1, frames, WIDTH)
    return lambda: run(x)


def needed(frames: int) -> float:
    """Return the GiB that the original needs for positional scores [H, T, 2T - 1], float32, and
    their padded copy."""
    return 2 * HEADS * frames * (2 * frames - 1) * 4 / 2**30


def entry(way: str, window: int | None, frames: int, machine: Machine, memory: bool) -> Entry:
    """Make an entry that runs the layer forward once, in a separate process, and measures time or
    peak memory.

    Raises:
        Unavailable: the original's tensors do not fit into the machine's memory.
    """
    there = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    if way == ORIGINAL and needed(frames) > there - 2:
        raise Unavailable(f"would need {needed(frames):,.0f} GiB")
    found = probe("audio", way, "" if window is None else str(window), (frames,), frames, machine, None)
    found.check = functools.partial(check, way, window)
    if not memory:  # measured anyway, but shown in the other table
        return Entry(found.run, found.check, warm_up=False, maximum=1)
    return found


def check(way: str, window: int | None) -> None:
    """Check the output against the original's in float64."""
    small = {"heads": 4, "width": 64}
    x = torch.randn(1, 300, 64)
    model, original = layer(ORIGINAL, window, **small)
    model.double()
    exact = original(x.double())
    _, run = layer(way, window, **small)
    require(run(x), exact, f"Parakeet's layer, {way}, window {window}")
