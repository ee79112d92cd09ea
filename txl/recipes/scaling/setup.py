"""A training as its processes share it, and the parameters that they replicate or shard."""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from itertools import chain
from math import prod

import torch
from torch import Tensor, nn

from txl.errors import TxlError
from txl.model import make_network
from txl.model.config import ModelConfig
from txl.model.transformer import TransformerXL
from txl.training.config import TrainConfig
from txl_kernels import RelAttention

MASTER = 4  # bytes of a parameter, a gradient or a moment of Adam

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Parameters:
    """Shapes of the parameters in the groups that `--shard` gathers at once.

    Attributes:
        root: of what stays gathered from forward to backward.
        layer: of one layer, gathered twice; () where layers belong to the root's group.
        layers: how many such groups.
        outside: numbers in parameters that belong to no layer, or to all.
    """

    root: tuple[Shape, ...]
    layer: tuple[Shape, ...]
    layers: int
    outside: int

    @property
    def count(self) -> int:
        return padded(self.root, 1) + self.layers * padded(self.layer, 1)

    def padded(self, processes: int) -> int:
        """As FSDP2 lays them out: the first dimension of each is filled up to a multiple of the
        processes."""
        return padded(self.root, processes) + self.layers * padded(self.layer, processes)


@dataclass(frozen=True)
class Setup:
    """A training of a model by several processes.

    Attributes:
        processes: a GPU each. node: GPUs that NVLink joins.
        shard: `txl train --shard`. bf16: precision bf16.
        mask: bytes of an element of a dropout mask: 1 on a GPU; a CPU keeps them in the data's
            dtype.
    """

    model: ModelConfig
    train: TrainConfig
    processes: int = 1
    node: int = 8
    shard: bool = False
    bf16: bool = True
    mask: int = 1

    def __post_init__(self) -> None:
        """Raises TxlError for what the counts are not of, and where `Batches` would."""
        if self.model.encoding != "relative" or self.model.pre_norm or self.model.variational_dropout:
            raise TxlError("counted are models with relative positions, norms after the sums and plain dropout")
        if self.train.optimizer != "adam" or self.train.average != "none":
            raise TxlError("counted is Adam without an average of the weights")
        if self.train.batch % (self.processes * self.train.batch_chunk):
            raise TxlError(f"batch {self.train.batch} is no multiple of {self.processes} x {self.train.batch_chunk}")

    @property
    def rows(self) -> int:
        """Of the batch, a process."""
        return self.train.batch // self.processes

    @property
    def chunk(self) -> int:
        """Rows computed at once."""
        return self.rows // self.train.batch_chunk

    @property
    def backwards(self) -> int:
        """Chunks an update."""
        return self.train.batch_chunk * self.train.accumulate

    @property
    def length(self) -> int:
        """Tokens of a row that a segment reads."""
        return self.train.scored + self.train.context

    @property
    def width(self) -> int:
        """Bytes of a number that is multiplied."""
        return 2 if self.bf16 else 4

    @property
    def parameters(self) -> Parameters:
        return parameters(self.model)

    @property
    def local(self) -> int:
        """Parameters that a process holds, padding included."""
        return self.parameters.padded(self.processes) // self.processes if self.shard else self.parameters.count


def padded(shapes: tuple[Shape, ...], processes: int) -> int:
    """Numbers in tensors of these shapes, each filled up to a multiple of `processes` rows."""
    return sum(-(-shape[0] // processes) * processes * prod(shape[1:]) for shape in shapes)


@cache
def parameters(model: ModelConfig) -> Parameters:
    """Counted without making them. Layers that share u and v are in the root's group."""
    with torch.device("meta"):
        network = make_network(model)
    assert isinstance(network, TransformerXL)
    inside = {id(p) for p in chain.from_iterable(block.parameters() for block in network.layers)}
    shared = {id(p) for p in _biases(network)} if not model.untie_r else set()
    others = [p for p in network.parameters() if id(p) not in inside - shared]
    outside = sum(p.numel() for p in others)
    if not model.untie_r:
        return Parameters(_shapes(network.parameters()), (), 0, outside)
    return Parameters(_shapes(others), _shapes(network.layers[0].parameters()), len(network.layers), outside)


def table_count(model: ModelConfig) -> int:
    """Numbers in the embeddings' tables, whose gradient is whole only when backward ends."""
    bins = model.bins
    if model.div_val == 1:
        return bins.vocab_size * bins.d_embed
    return sum(width * (bins.bounds[i + 1] - bins.bounds[i]) for i, width in enumerate(bins.widths))


def _biases(network: TransformerXL) -> tuple[Tensor, Tensor]:
    attention = network.layers[0].attention
    assert isinstance(attention, RelAttention)
    return attention.biases()


def _shapes(parameters: Iterable[nn.Parameter]) -> tuple[Shape, ...]:
    return tuple(tuple(p.shape) for p in parameters)
