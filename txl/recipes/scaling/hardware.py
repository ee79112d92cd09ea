"""A GPU and its links: published figures, and what is assumed of them. Nothing is measured."""

import math
from dataclasses import dataclass
from typing import NamedTuple


class Latency(NamedTuple):
    """Seconds a collective begins with, and a step takes inside a node and between nodes."""

    base: float
    inside: float
    between: float


# NCCL's model of itself: src/graph/tuning.cc at 01afd20a, protocol LL128.
RING, TREE = Latency(10e-6, 1.9e-6, 4e-6), Latency(4.4e-6, 1.2e-6, 8.5e-6)


@dataclass(frozen=True)
class Hardware:
    """A GPU among others.

    Attributes:
        memory: bytes. bandwidth: of it, bytes a second. peak: bfloat16 operations a second, dense.
        link: bytes a second from a GPU to the others of its node, one direction. network: to other
            nodes.
        used: share of the peak that matrix products reach; an assumption.
        launch: seconds the host takes for an operation where nothing is compiled; an assumption.
        ring, tree: of NCCL's own model of its algorithms.
    """

    name: str
    memory: float
    bandwidth: float
    peak: float
    link: float
    network: float
    used: float = 0.4
    launch: float = 5e-6
    ring: Latency = RING
    tree: Latency = TREE

    def across(self, processes: int, node: int) -> float:
        """Bytes a second that a ring through all processes carries: a node's GPUs share out what
        goes over its border, so all of their network links work at once."""
        return self.link if processes <= node else min(self.link, self.network * min(node, processes))


def steps(processes: int, node: int, latency: Latency, tree: bool) -> float:
    """Seconds that the hops of a pass take, as NCCL's model has them (`ncclTopoTuneModel`)."""
    nodes = -(-processes // node)
    inside = min(processes, node)
    if tree:
        return (inside - 1) * latency.inside + math.log2(nodes) * latency.between
    return (processes - nodes) * latency.inside + (nodes - 1) * latency.between


# NVIDIA's data sheets of the H200 (141 GB, 4.8 TB/s, 1,979 TFLOPS with sparsity, NVLink 900 GB/s
# both ways together) and the DGX H200 (a 400 Gb/s ConnectX-7 a GPU).
H200 = Hardware("H200", 141e9, 4.8e12, 989e12, 450e9, 50e9)
