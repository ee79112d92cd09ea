"""The seed of dropout, drawn so that forward and backward have the same.

A compiled graph's backward may compute again what forward did not keep: torch's partitioner does so
to hold an activation memory budget, and a number drawn again is another one. So an operator draws
the seed, as whose value torch is told to keep it.
"""

import torch
from torch import Tensor
from torch.fx.traceback import get_current_meta
from torch.utils.checkpoint import CheckpointPolicy

_library = torch.library.Library("txl_kernels", "FRAGMENT")
_library.define("new_seed(Device device) -> Tensor", tags=(torch.Tag.nondeterministic_seeded,))


def new_seed(device: torch.device) -> Tensor:
    """A seed, int64 [1], drawn from torch's generator of the device."""
    if torch.compiler.is_compiling():
        seed: Tensor = torch.ops.txl_kernels.new_seed(device)
        return seed
    return _draw(device)


def _draw(device: torch.device) -> Tensor:
    return torch.randint(-(2**63), 2**63 - 1, (1,), dtype=torch.int64, device=device)


def _draw_to_keep(device: torch.device) -> Tensor:
    """`_draw`, whose node in a graph that is being traced is marked as one to be saved: the mark of
    selective activation checkpointing."""
    meta = get_current_meta()
    before = meta.get("recompute")
    meta["recompute"] = CheckpointPolicy.MUST_SAVE
    try:
        return _draw(device)
    finally:
        if before is None:
            del meta["recompute"]
        else:
            meta["recompute"] = before


# Of a composite operator, a graph holds what it is made of: torch's randint, which every pass over
# graphs knows as random. vmap has randomness of its own, which it adds where it meets the operator.
for _key in ("CompositeImplicitAutograd", "FuncTorchVmapMode"):
    _library.impl("new_seed", _draw_to_keep, _key)
