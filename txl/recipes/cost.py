"""The cost of a recipe in counted multiply-adds."""

import math
from dataclasses import dataclass

from txl.model.config import Bins, Config, ModelConfig, RecurrentConfig
from txl.training.config import TrainConfig

TRAINING = 3  # forward, and twice that backward


@dataclass(frozen=True)
class Cost:
    """Operations of training a model.

    Attributes:
        tokens: scored in all.
        token: floating-point operations of one scored token forward, 2 a multiply-add.
        total: of all updates, forward and backward.
    """

    tokens: int
    token: float
    total: float

    def hours(self, rate: float) -> float:
        """Hours of training; rate: operations a second that a machine sustains."""
        return self.total / rate / 3600


def training_cost(config: Config, training: TrainConfig) -> Cost:
    """Matrix products of all updates; additions, norms and softmaxes are not counted."""
    tokens = training.steps * training.batch * training.scored * training.accumulate
    forward = 2 * segment_products(config, training) / (training.batch * training.scored)
    return Cost(tokens, forward, TRAINING * forward * tokens)


def segment_products(config: Config, training: TrainConfig) -> float:
    """Multiply-adds of one segment of the whole batch, forward."""
    length, scored, batch = training.scored + training.context, training.scored, training.batch
    softmax = batch * scored * softmax_products(config.bins, config.d_model)
    embedding = 0.0
    if config.bins.widths[0] != config.d_model:  # projections of the embeddings, of the widest bin's size
        embedding = batch * length * config.bins.widths[0] * config.d_model
    if isinstance(config, RecurrentConfig):
        return batch * length * recurrent_products(config) + softmax + embedding
    layer = layer_products(config, length, config.mem_len, batch)
    return config.n_layer * layer + softmax + embedding


def layer_products(config: ModelConfig, length: int, mem_len: int, batch: int) -> float:
    """Multiply-adds of a Transformer's layer over a segment after a memory of hidden states, whose
    keys and values are projected anew."""
    width = config.n_head * config.d_head
    projections = float(config.d_model * width * (4 * length + 2 * mem_len))
    if config.encoding == "relative":  # W_kR R, once for the batch
        projections += config.d_model * width * (length + mem_len) / batch
    terms = 2 if config.absolute else 3  # q . k, q . r, weights times values
    feed_forward = 2 * length * config.d_model * config.d_inner
    return batch * (projections + terms * width * visible_pairs(length, mem_len, config.window) + feed_forward)


def visible_pairs(length: int, mem_len: int, window: int | None) -> int:
    """Pairs of queries and keys, with a full memory."""
    return sum(min(mem_len + i + 1, window or mem_len + length) for i in range(length))


def recurrent_products(config: RecurrentConfig) -> float:
    """Multiply-adds of one token through an LSTM's or QRNN's layers."""
    if config.network == "lstm":
        return sum(4 * d_out * (d_in + d_out) for d_in, d_out in config.widths)
    return sum(3 * d_out * d_in * (2 if i == 0 else 1) for i, (d_in, d_out) in enumerate(config.widths))


def softmax_products(bins: Bins, d_model: int) -> float:
    """Multiply-adds of one target: the head, and each tail as often as Zipf's law has a word in
    it."""
    head = bins.widths[0] * bins.head_size + (0 if bins.widths[0] == d_model else d_model * bins.widths[0])
    harmonic = [math.log(bound) + 0.5772 if bound else 0.0 for bound in bins.bounds]
    products = float(head)
    for i in range(1, len(bins)):
        share = (harmonic[i + 1] - harmonic[i]) / harmonic[-1]
        size = bins.bounds[i + 1] - bins.bounds[i]
        projection = 0 if bins.widths[i] == d_model else d_model * bins.widths[i]
        products += share * (bins.widths[i] * size + projection)
    return products
