"""Time of an update: what is computed, what the host launches, what is exchanged."""

from dataclasses import dataclass, replace

from txl.recipes.cost import TRAINING, layer_products, segment_products
from txl.recipes.scaling.activations import layer_bytes
from txl.recipes.scaling.hardware import Hardware, steps
from txl.recipes.scaling.setup import Setup
from txl.recipes.scaling.traffic import BUCKET, Collective, collectives

# Operations of a chunk, forward and backward, which a test counts: a layer's, those around all
# layers, a tail's of the vocabulary, and what its own table and projection add.
LAYER, AROUND, TAIL, NARROW = 80, 60, 35, 35
PASSES = 5  # over each activation: written, read forward and backward, its gradient written and read
WEIGHTS = 12  # bytes of a parameter a chunk: bfloat16 twice, its gradient in bfloat16, then in float32
ADAM = 46  # bytes of a parameter an update: Adam 28, norm and clipping 12, its bfloat16 copy 6


@dataclass(frozen=True)
class StepTime:
    """Seconds of an update.

    Attributes:
        products: matrix products at the assumed share of the peak; needed: of them, without what
            recompute adds.
        traffic: the device's memory; launches: the host. Of the three the longest counts.
        optimizer: Adam.
        exchanged: of all collectives; waited: of that, what computing does not hide.
    """

    products: float
    needed: float
    traffic: float
    launches: float
    optimizer: float
    exchanged: float
    waited: float

    @property
    def computing(self) -> float:
        return max(self.products, self.traffic, self.launches)

    @property
    def total(self) -> float:
        return self.computing + self.optimizer + self.waited

    @property
    def efficiency(self) -> float:
        """Share of the update that the needed products take."""
        return self.needed / self.total

    @property
    def bound(self) -> str:
        """What takes longest."""
        kinds = {"products": self.products, "memory": self.traffic, "launches": self.launches}
        kinds |= {"exchange": self.waited, "Adam": self.optimizer}
        return max(kinds, key=lambda name: kinds[name])


def step_time(setup: Setup, hardware: Hardware) -> StepTime:
    """Assumed: work of a kind is done at one rate throughout, and no process waits for another's
    data or host."""
    rate = hardware.peak * hardware.used
    needed = operations(replace(setup, train=replace(setup.train, recompute=False))) / rate
    m, again = setup.model, 4 / 3 if setup.train.recompute else 1.0
    activations = m.n_layer * layer_bytes(setup, positions=setup.bf16) * PASSES * again
    traffic = setup.backwards * (activations + WEIGHTS * setup.parameters.count) / hardware.bandwidth
    launches = setup.backwards * launched(setup) * hardware.launch
    adam = ADAM * setup.local / hardware.bandwidth
    time = StepTime(operations(setup) / rate, needed, traffic, launches, adam, 0.0, 0.0)
    exchanged, waited = _exchange(setup, hardware, time.computing)
    return replace(time, exchanged=exchanged, waited=waited)


def launched(setup: Setup) -> float:
    """Operations that the host launches for a chunk, forward and backward."""
    again = 4 / 3 if setup.train.recompute else 1.0
    tail = TAIL + (NARROW if setup.model.div_val > 1 else 0)
    return setup.model.n_layer * LAYER * again + AROUND + tail * (len(setup.model.bins) - 1)


def operations(setup: Setup) -> float:
    """Floating-point operations of a process an update; a layer's forward twice with recompute."""
    chunk = replace(setup.train, batch=setup.chunk, batch_chunk=1)
    products = TRAINING * segment_products(setup.model, chunk)
    if setup.train.recompute:
        products += setup.model.n_layer * layer_products(setup.model, setup.length, setup.model.mem_len, setup.chunk)
    return 2 * products * setup.backwards


def exchange_time(each: Collective, setup: Setup, hardware: Hardware) -> float:
    """Seconds of all `times`: by a ring, or for a sum by a tree where that is sooner."""
    n, node = setup.processes, setup.node
    moving = each.sent(n) / hardware.across(n, node)
    passes = 2 if each.kind == "all_reduce" else 1
    messages = each.times * (-(-each.payload // BUCKET) if each.kind == "all_reduce" else 1)
    ring = hardware.ring.base + passes * steps(n, node, hardware.ring, tree=False)
    if each.kind == "all_reduce":
        ring = min(ring, hardware.tree.base + passes * steps(n, node, hardware.tree, tree=True))
    return moving + messages * ring


def _exchange(setup: Setup, hardware: Hardware, computing: float) -> tuple[float, float]:
    """(all, what computing does not hide): gradients hide behind backward of the last chunk, two
    thirds of its computing; a sharded layer's parameters and gradients behind everything."""
    late = hidden = 0.0
    for each in collectives(setup):
        seconds = exchange_time(each, setup, hardware)
        if each.late:
            late += seconds
        else:
            hidden += seconds
    cover = computing if setup.shard else computing / setup.backwards * 2 / 3
    return late + hidden, late + max(hidden - cover, 0.0)
