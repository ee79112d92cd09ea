"""Transformer-XL relative-position attention (Dai et al. 2019), exact and linear in memory."""

import txl_kernels.flops  # noqa: F401  # registers the formulas
from txl_kernels.backends import available_backends
from txl_kernels.bounds import (
    bounds_from_cu_seqlens,
    end_from_lengths,
    intervals,
    start_from_done,
    start_from_lengths,
)
from txl_kernels.cache import KeyValueCache
from txl_kernels.checks import KeyValuePair, Outside, Window
from txl_kernels.composed import Chunk
from txl_kernels.functional import rel_attention, rel_attention_weights
from txl_kernels.layer import RelAttention, sinusoid
from txl_kernels.learned import LearnedRelativeAttention
from txl_kernels.positions import alibi_slopes, t5_buckets
from txl_kernels.static_cache import StaticCache

__version__ = "0.1.0"

__all__ = [
    "Chunk", "KeyValueCache", "KeyValuePair", "LearnedRelativeAttention", "Outside", "RelAttention", "StaticCache", "Window",
    "__version__", "alibi_slopes", "available_backends", "bounds_from_cu_seqlens", "end_from_lengths", "intervals",
    "rel_attention", "rel_attention_weights", "sinusoid", "start_from_done", "start_from_lengths", "t5_buckets",
]  # fmt: skip
