"""A streaming speech encoder of another library, accelerated in one line: transformers' Nemotron,
with random weights, offline and in chunks of its key/value cache.

pip install "transformers>=5.24"; python examples/speech_encoder.py
"""

import sys
import time
from typing import Any

import torch
from torch import Tensor

try:
    from transformers import NemotronAsrStreamingEncoder, NemotronAsrStreamingEncoderConfig
except ImportError as error:
    sys.exit(f'{error}: pip install "transformers>=5.24"')

from txl_kernels.integrations import accelerate

STRIDE = 8  # input frames of an encoder's frame


def stream(encoder: Any, features: Tensor, chunk: int) -> tuple[Tensor, float]:
    """Hidden states of features that come chunk by chunk; seconds a chunk, the median."""
    past, padding, outs, times = None, None, [], []
    first, size = 0, chunk * STRIDE - STRIDE + 1  # the first frame needs no context
    while first < features.size(1):
        began = time.perf_counter()
        result = encoder(
            features[:, first : first + size], cache=past, padding_cache=padding, use_cache=True,
            num_lookahead_tokens=chunk - 1,
        )  # fmt: skip
        times.append(time.perf_counter() - began)
        past, padding = result.cache, result.padding_cache
        outs.append(result.last_hidden_state)
        first, size = first + size, chunk * STRIDE
    return torch.cat(outs, 1), sorted(times)[len(times) // 2]


def whole(encoder: Any, features: Tensor, chunk: int) -> tuple[Tensor, float]:
    """Hidden states of features that are there at once; seconds."""
    began = time.perf_counter()
    hidden = encoder(features, num_lookahead_tokens=chunk - 1).last_hidden_state
    return hidden, time.perf_counter() - began


@torch.no_grad()
def main(layers: int = 4, width: int = 512, left: int = 70, chunk: int = 7, chunks: int = 320) -> None:
    torch.manual_seed(0)
    config = NemotronAsrStreamingEncoderConfig(
        num_hidden_layers=layers, hidden_size=width, num_attention_heads=8, num_key_value_heads=8,
        intermediate_size=4 * width, sliding_window=left + 1, default_num_lookahead_tokens=chunk - 1,
    )  # fmt: skip
    config._attn_implementation = "sdpa"
    encoder = NemotronAsrStreamingEncoder(config).eval()
    features = torch.randn(1, chunks * chunk * STRIDE - STRIDE + 1, config.num_mel_bins)

    part = features[:, : 30 * chunk * STRIDE - STRIDE + 1]
    _, a_chunk = stream(encoder, part, chunk)
    original, at_once = whole(encoder, features, chunk)
    print(accelerate(encoder, streaming=True))
    streamed, chunk_faster = stream(encoder, part, chunk)
    offline, faster = whole(encoder, features, chunk)
    print(f"{features.size(1) / 100:.0f} s of audio at once: {at_once:.2f} s before, {faster:.2f} s accelerated")
    print(f"in chunks: {a_chunk * 1e3:.1f} ms a chunk before, {chunk_faster * 1e3:.1f} ms accelerated")
    print(f"largest difference from before: {(offline - original).abs().max():.1e}")
    torch.testing.assert_close(offline, original, rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(streamed, offline[:, : streamed.size(1)], rtol=1e-3, atol=1e-3)


if __name__ == "__main__":
    main()
