"""A text without end, segment by segment: keys and values are cached, time and memory constant.

python examples/streaming.py
"""

import time

import torch

from txl_kernels import RelAttention


@torch.inference_mode()
def main(segments: int = 400, length: int = 8, window: int = 1024) -> None:
    torch.manual_seed(0)
    layer = RelAttention(d_model=256, n_head=4, window=window).eval()
    cache = layer.new_cache(batch=1, mem_len=window - 1, max_segment=length)  # and the position itself
    stream = torch.randn(1, segments * length, 256)

    outputs, times = [], []
    for segment in stream.split(length, 1):
        began = time.perf_counter()
        outputs.append(layer(segment, cache=cache))
        times.append(time.perf_counter() - began)
    for n in range(segments // 4 - 1, segments, segments // 4):
        recent = sorted(times[max(n - 20, 0) : n + 1])
        print(f"after {(n + 1) * length:5} positions: {recent[len(recent) // 2] * 1e3:.2f} ms a segment")
    print(cache)

    whole = layer(stream)  # the same window, everything at once
    print(f"largest difference from the whole text at once: {(torch.cat(outputs, 1) - whole).abs().max():.1e}")
    torch.testing.assert_close(torch.cat(outputs, 1), whole, rtol=1e-4, atol=1e-5)


if __name__ == "__main__":
    main()
