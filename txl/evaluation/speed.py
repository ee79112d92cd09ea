"""Evaluation speed: the cached model against a vanilla one with a sliding window (Table 9)."""

import dataclasses
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from txl.evaluation.readers import Engine
from txl.model.config import ModelConfig
from txl.model.transformer import TransformerXL


@dataclass(frozen=True)
class Speedup:
    """Median seconds a token of both, measured alternately in one run."""

    attn_len: int
    vanilla_s: float
    cached_s: float

    @property
    def ratio(self) -> float:
        return self.vanilla_s / self.cached_s


def vanilla_config(config: ModelConfig) -> ModelConfig:
    """The vanilla Transformer of the same sizes: sinusoids added to the embeddings, no memory."""
    return dataclasses.replace(
        config, encoding="sinusoid", mem_len=0, table_len=None, window=None, clamp_len=None, untie_r=False, pre_norm=False,
        final_norm=False,
    )  # fmt: skip


def predict(model: TransformerXL, window: Tensor, last_layer_in_full: bool = True) -> Tensor:
    """Logits [B, vocab_size] of the token after a window [B, W], read from an empty state.

    last_layer_in_full: as published; False leaves out what the last token does not need.
    """
    hidden = model.read(window, mem_len=0, last=None if last_layer_in_full else 1).hidden
    return model.logits(hidden[:, -1])


def _seconds(run: Callable[[], object], device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    began = time.perf_counter()
    run()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - began


@torch.inference_mode()
def measure_speedup(
    model: TransformerXL, tokens: Tensor, attn_len: int, *, segment: int = 128, rounds: int = 5
) -> Speedup:
    """Times both models on the same text, batch 1.

    The vanilla model has the same sizes and untrained weights (its speed does not depend on them)
    and makes one prediction a forward pass over `attn_len` tokens; the cached one advances by
    `segment` tokens with a full memory.

    tokens: [1, at least attn_len + segment].
    """
    device = model.device
    tokens = tokens.to(device)
    vanilla = TransformerXL(vanilla_config(model.config)).to(device).eval()
    engine = Engine(model, 1, attn_len, segment)
    window, part = tokens[:, :attn_len], tokens[:, attn_len : attn_len + segment]
    for piece in window.split(segment, 1):
        engine(piece)
    slow, fast = [], []
    for n in range(rounds + 1):
        cached_s, vanilla_s = _seconds(lambda: engine(part), device), _seconds(lambda: predict(vanilla, window), device)
        if n:  # the first round warms both up
            fast.append(cached_s / part.size(1))
            slow.append(vanilla_s)
    return Speedup(attn_len, statistics.median(slow), statistics.median(fast))
