"""Cost of training a recipe, as a count of multiply-adds."""

import math
from dataclasses import dataclass

from txl.model.config import Config, ModelConfig, NetworkConfig, RecurrentConfig
from txl.training.config import TrainConfig

TRAINING = 3  # cost of an update relative to its forward pass: backward costs twice as much


@dataclass(frozen=True)
class Cost:
    """Number of operations for training a model.

    Attributes:
        tokens: number of tokens scored.
        token: floating-point operations of the forward pass for one scored token (2 per
            multiply-add).
        total: floating-point operations of all updates, forward and backward.
    """

    tokens: int
    token: float
    total: float

    def hours(self, rate: float) -> float:
        """Return the hours of training; rate: operations per second that the machine sustains."""
        return self.total / rate / 3600


def training_cost(config: Config, training: TrainConfig) -> Cost:
    """Count the matrix products of all updates; additions, norms and softmaxes are left out."""
    tokens = training.steps * training.batch * training.scored * training.accumulate
    forward = 2 * segment_products(config, training) / (training.batch * training.scored)
    return Cost(tokens, forward, TRAINING * forward * tokens)


def segment_products(config: Config, training: TrainConfig) -> float:
    """Count multiply-adds of the forward pass of one segment of the whole batch."""
    length, scored, batch = training.scored + training.context, training.scored, training.batch
    softmax = batch * scored * softmax_products(config)
    embedding = 0.0
    if config.embed_width != config.d_model:  # projections of the embeddings, counted with the widest bin's size
        embedding = batch * length * config.embed_width * config.d_model
    if isinstance(config, RecurrentConfig):
        return batch * length * recurrent_products(config) + softmax + embedding
    layer = layer_products(config, length, config.mem_len, batch)
    return config.n_layer * layer + softmax + embedding


def layer_products(config: ModelConfig, length: int, mem_len: int, batch: int) -> float:
    """Count multiply-adds of a Transformer layer for one segment. Keys and values of the memory are
    projected anew."""
    width = config.n_head * config.d_head
    projections = float(config.d_model * width * (4 * length + 2 * mem_len))
    if config.encoding == "relative":  # projection of the position encodings, W_kR R, once for the batch
        projections += config.d_model * width * (length + mem_len) / batch
    terms = 2 if config.absolute else 3  # q . k, q . r (relative positions only), and weights times values
    feed_forward = 2 * length * config.d_model * config.d_inner
    return batch * (projections + terms * width * visible_pairs(length, mem_len, config.window) + feed_forward)


def visible_pairs(length: int, mem_len: int, window: int | None) -> int:
    """Count the pairs of a query and a key it sees, with a full memory."""
    return sum(min(mem_len + i + 1, window or mem_len + length) for i in range(length))


def recurrent_products(config: RecurrentConfig) -> float:
    """Count multiply-adds of one token in the layers of an LSTM or QRNN."""
    if config.network == "lstm":
        return sum(4 * d_out * (d_in + d_out) for d_in, d_out in config.widths)
    return sum(3 * d_out * d_in * (2 if i == 0 else 1) for i, (d_in, d_out) in enumerate(config.widths))


def softmax_products(config: NetworkConfig) -> float:
    """Count multiply-adds of one target: the head, and each tail times the probability that Zipf's
    law gives its words."""
    bounds, widths, d_model = config.bounds, config.embed_widths, config.d_model
    head_size = bounds[1] + len(config.cutoffs)  # the words of the first bin and the clusters
    head = widths[0] * head_size + (0 if widths[0] == d_model else d_model * widths[0])
    harmonic = [math.log(bound) + 0.5772 if bound else 0.0 for bound in bounds]
    products = float(head)
    for i in range(1, len(widths)):
        share = (harmonic[i + 1] - harmonic[i]) / harmonic[-1]
        size = bounds[i + 1] - bounds[i]
        projection = 0 if widths[i] == d_model else d_model * widths[i]
        products += share * (widths[i] * size + projection)
    return products
