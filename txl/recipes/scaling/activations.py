"""Bytes that forward keeps for backward: linear in memory and segment, no scores of queries and
keys."""

import math

from txl.recipes.scaling.setup import Setup

FLOAT, INDEX = 4, 8  # bytes of float32, of int64


def layer_bytes(setup: Setup, *, positions: bool = True) -> int:
    """Of a layer for one chunk, beside its memory of hidden states and the casts of parameters.

    positions: with the encodings of distances; in float32 all layers have the same.
    """
    m, b, mask = setup.model, setup.width, setup.mask
    width, tokens, distances = m.n_head * m.d_head, setup.chunk * setup.length, setup.length + m.mem_len
    memory = setup.chunk * m.mem_len
    attention = b * (tokens * (m.d_model + 3 * width + width) + distances * width + 2 * memory * width)
    attention += FLOAT * tokens * m.n_head  # lse
    attention += INDEX if m.attn_dropout else 0  # the seed
    norms = 2 * FLOAT * tokens * (m.d_model + 2)  # input, mean, deviation
    feed_forward = b * tokens * (m.d_model + m.d_inner)
    if m.dropout:
        feed_forward += b * tokens * m.d_inner + mask * tokens * (2 * m.d_model + m.d_inner)
    return attention + norms + feed_forward + (b * distances * m.d_model if positions else 0)


def layer_casts(setup: Setup) -> int:
    """Of a layer's parameters in bfloat16, that autocast makes and backward needs; sharded ones are
    gathered in bfloat16 already."""
    m = setup.model
    if not setup.bf16 or setup.shard:
        return 0
    width = m.n_head * m.d_head
    return 2 * (4 * m.d_model * width + 2 * m.d_model * m.d_inner + 2 * width)


def kept_by_layer(setup: Setup) -> int:
    """Of a layer between forward and backward; with recompute its input alone, which FSDP rounds
    for a layer that it gathers by itself."""
    if setup.train.recompute:
        rounded = setup.shard and setup.parameters.layers
        return (setup.width if rounded else FLOAT) * setup.chunk * setup.length * setup.model.d_model
    return layer_bytes(setup, positions=setup.bf16)


def softmax_bytes(setup: Setup) -> tuple[int, int]:
    """(what is kept for backward, most at any time) of the adaptive softmax over one chunk.

    Tails are as long as Zipf's law has targets in them. Kept are log-probabilities in float32. At
    the most two gradients of their size stand beside them (in forward: scores in float32, and in
    bfloat16 before and after the clusters' are joined to the head's, which is no more).
    """
    bins = setup.model.bins
    scored = setup.chunk * setup.train.scored
    numbers = scored * bins.head_size
    for i, share in enumerate(_zipf(setup)[1:], 1):
        numbers += round(scored * share) * (bins.bounds[i + 1] - bins.bounds[i])
    hidden = setup.width * scored * setup.model.d_model
    return FLOAT * numbers + hidden, 3 * FLOAT * numbers + hidden


def _zipf(setup: Setup) -> list[float]:
    bounds = setup.model.bins.bounds
    harmonic = [math.log(bound) + 0.5772 if bound else 0.0 for bound in bounds]
    return [(harmonic[i] - harmonic[i - 1]) / harmonic[-1] for i in range(1, len(bounds))]


def in_flight(setup: Setup) -> int:
    """Gradients of one layer's activations that stand at once in its backward; an estimate."""
    m, b, tokens = setup.model, setup.width, setup.chunk * setup.length
    width = m.n_head * m.d_head
    projections = b * (3 * tokens + 2 * setup.chunk * m.mem_len) * width + FLOAT * (setup.length + m.mem_len) * width
    return max(projections, 2 * b * tokens * m.d_inner) + 2 * FLOAT * tokens * m.d_model
