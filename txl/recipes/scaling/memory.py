"""Memory that training takes on each device."""

from dataclasses import dataclass, fields

from txl.recipes.scaling.activations import FLOAT, in_flight, kept_by_layer, layer_bytes, layer_casts, softmax_bytes
from txl.recipes.scaling.setup import MASTER, Setup, padded


@dataclass(frozen=True)
class DeviceMemory:
    """Bytes, at the moment of an update that needs the most.

    Attributes:
        parameters, gradients, optimizer: what the process holds of them; Adam's are two moments.
        casts: parameters in bfloat16: autocast's copies, or what is gathered of sharded ones, with
            gradients that are not yet scattered.
        hidden: the memory of hidden states, and the next one that forward makes.
        activations: kept for backward.
        passing: of the softmax, of a layer in backward, or the square roots that Adam's foreach
            implementation makes; activations are 0 where the most is needed after backward.
    """

    parameters: int
    gradients: int
    optimizer: int
    casts: int
    hidden: int
    activations: int
    passing: int

    @property
    def states(self) -> int:
        """What stays between updates beside the hidden states."""
        return self.parameters + self.gradients + self.optimizer

    @property
    def total(self) -> int:
        return sum(getattr(self, f.name) for f in fields(self))


def device_memory(setup: Setup) -> DeviceMemory:
    """Without the allocator's gaps, the CUDA context (0.5 GB) and NCCL's buffers."""
    local = MASTER * setup.local
    m, recompute = setup.model, setup.train.recompute
    hidden = hidden_states(setup) + next_hidden(setup)
    shared = FLOAT * (setup.length + m.mem_len) * m.d_model  # encodings of distances
    ends = 2 * setup.mask * setup.chunk * setup.length * m.d_model if m.dropout else 0  # of embeddings and last states
    kept, most = softmax_bytes(setup)
    activations = m.n_layer * kept_by_layer(setup) + shared + ends + kept
    if setup.bf16 and not recompute and not setup.shard:  # the layers' inputs, which the next memory is made of
        activations += m.n_layer * FLOAT * setup.chunk * setup.length * m.d_model
    layer = in_flight(setup) + (layer_bytes(setup, positions=setup.bf16) if recompute else 0)
    passing = max(most, layer) - kept  # the softmax's own are gone when layers begin
    moments = [(casts(setup), activations, passing), (scattering(setup), 0, 0), (0, 0, MASTER * setup.local)]
    most_casts, kept_then, passing = max(moments, key=sum)
    return DeviceMemory(local, local, 2 * local, most_casts, hidden, kept_then, passing)


def hidden_states(setup: Setup) -> int:
    """The memory of a process's rows."""
    return setup.model.n_layer * setup.rows * setup.model.mem_len * setup.model.d_model * setup.width


def next_hidden(setup: Setup) -> int:
    """Of the memory that a chunk leaves, beside the one it reads: a copy where it is longer than
    the segment, else the layers' own inputs."""
    m = setup.model
    if m.mem_len <= setup.length:
        return 0
    return m.n_layer * setup.chunk * m.mem_len * m.d_model * setup.width


def casts(setup: Setup) -> int:
    """Parameters in the dtype that is multiplied beside the process's own, in backward; of sharded
    ones what is gathered, with gradients in that dtype.

    Two layers are gathered at once: the one that computes and the next. A layer's gradient is
    scattered from a float32 copy.
    """
    p, b = setup.parameters, setup.width
    if not setup.shard:
        layers = 1 if setup.train.recompute else setup.model.n_layer
        return layers * layer_casts(setup) + (2 * p.outside if setup.bf16 else 0)
    root, layer = padded(p.root, setup.processes), padded(p.layer, setup.processes)
    return 2 * b * root + (3 * b + MASTER) * layer


def scattering(setup: Setup) -> int:
    """What is there when the root's gradient is scattered, at the very end: itself and a float32
    copy; 0 for replicas."""
    return (setup.width + MASTER) * padded(setup.parameters.root, setup.processes) if setup.shard else 0
