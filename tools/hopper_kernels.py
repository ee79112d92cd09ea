"""The instance of a Hopper kernel of csrc/cuda, by its mangled name."""

import re
from typing import NamedTuple


class Instance(NamedTuple):
    """The template arguments of a kernel's shape (csrc/cuda/hopper/config.cuh) that begin it.

    Attributes:
        kernel: forward, backward_queries or backward_keys.
        groups: consumer warpgroups of a block, besides the producer.
        has_q_pos: True for an instance with queries of positions.
    """

    kernel: str
    dtype: str
    width: int
    groups: int
    has_q_pos: bool


def instance(mangled: str) -> Instance | None:
    """Return the instance; None for other kernels.

    forward_kernel<ForwardShape<Bf16, 64, 3, ..>> -> forward, bf16, width 64, 3 groups
    """
    pattern = r"\d(forward|backward_queries|backward_keys)_kernel.*?(Bf16|F16)ELi(\d+)ELi(\d+)E"
    found = re.search(pattern, mangled)
    if found is None:
        return None
    has_q_pos = re.search(r"Lb1EEEEEv", mangled) is not None  # the last argument of the shape
    return Instance(found[1], found[2].lower(), int(found[3]), int(found[4]), has_q_pos)
