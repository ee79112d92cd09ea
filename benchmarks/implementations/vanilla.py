"""The vanilla model of Al-Rfou et al., a window that slides one token at a time, computed in
several ways."""

import functools
from collections.abc import Callable

import torch
from original import original_absolute_qkbh
from torch import Tensor

from harness.checks import require
from implementations.attention import compiler
from implementations.models import MOST, small
from txl import TransformerXL
from txl.evaluation.speed import predict, vanilla_config

# Algorithm: its title.
VANILLA = {
    "vanilla-eager": "vanilla, eager as published",
    "vanilla-flash": "vanilla, flash SDPA",
    "vanilla-compiled": "vanilla, flash SDPA, compiled",
    "vanilla-last": "vanilla, compiled, last layer for one token",
}


def vanilla(model: TransformerXL, algorithm: str) -> Callable[[Tensor], Tensor]:
    """A vanilla model of these sizes, untrained: predict(window [B, W]) -> logits [B, vocab_size].

    algorithm: "vanilla-eager": scores built in full in the original's layout; "vanilla-flash":
    torch's fused attention; "vanilla-compiled": that, each layer under torch.compile;
    "vanilla-last": that, and the last layer computes only what the last token needs.
    """
    torch.manual_seed(1)
    # Weights that any dtype holds, so that models of two dtypes are the same.
    it = TransformerXL(vanilla_config(model.config)).bfloat16().to(model.device, model.softmax.bias.dtype).eval()
    if algorithm == "vanilla-eager":
        for block in it.layers:
            block.attention.attend = _eager_attend
    if algorithm in ("vanilla-compiled", "vanilla-last"):
        compiler()
        for block in it.layers:
            block.compile(dynamic=True)
    read = functools.partial(predict, it, last_layer_in_full=algorithm != "vanilla-last")
    ready: Callable[[Tensor], Tensor] = torch.inference_mode()(read)
    return ready


def _eager_attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k, v = (x.permute(2, 0, 1, 3) for x in (q, k, v))
    return original_absolute_qkbh(q, k, v).permute(1, 2, 0, 3)


def check_vanilla(algorithm: str, dtype: torch.dtype, device: torch.device) -> None:
    """Refuses a vanilla model whose logits differ from the eager one's in float64."""
    model, exact, tokens = small(dtype, device)
    require(vanilla(model, algorithm)(tokens), vanilla(exact, "vanilla-eager")(tokens), "logits", MOST[dtype])
